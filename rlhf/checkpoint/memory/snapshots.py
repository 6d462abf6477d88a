"""Publishes a snapshot of the state in the nodes' memory every `checkpoint.memory.freq` steps.

A snapshot is a checkpoint in a folder on a tmpfs, which outlives the ranks: the same protocol writes it, and a resume
reads it like a checkpoint. tmpfs ignores syncs. A power cut loses the folder, so no snapshot counts as saved. With
`checkpoint.memory.replicas`, other nodes store copies of a node's part.
"""

import logging
import math
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from rlhf.checkpoint.commit.deleter import Deleter
from rlhf.checkpoint.commit.identity import Identity
from rlhf.checkpoint.commit.publication import roll_forward
from rlhf.checkpoint.commit.removal import clean_leftovers
from rlhf.checkpoint.commit.retention import remove_checkpoints
from rlhf.checkpoint.load.from_memory import MemoryPlace
from rlhf.checkpoint.save.background import SaveInFlight
from rlhf.checkpoint.save.host_memory import check_memory
from rlhf.checkpoint.save.node_copies import copied_to
from rlhf.checkpoint.save.pending import begin_checkpoint
from rlhf.checkpoint.save.snapshot import take_snapshot
from rlhf.checkpoint.save.staging import Stager
from rlhf.checkpoint.save.writer import SaveResult, write_checkpoint
from rlhf.checkpoint.start.domains import find_domains
from rlhf.checkpoint.state.run_state import RunState
from rlhf.config.schema.checkpoint import STATE, CheckpointConfig
from rlhf.errors import UserError
from rlhf.events import announce
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.memory_folder import SNAPSHOTS, check_room, copies_text, less_memory, make_folder, memory_folder
from rlhf.ranks.transport import LostPeer
from rlhf.ranks.world import LOCAL_WORLD_SIZE
from rlhf.storage.disk_errors import SaveFailed
from rlhf.storage.layout import scan, step_of

log = logging.getLogger(__name__)


class MemorySnapshots:
    """Takes and publishes the snapshots of a run. All methods are collective, except `metrics` and `wait_for_end`.

    A thread publishes a copy of the state over process groups of its own, so that a save on disk may run meanwhile. The
    next snapshot waits for the thread. A failed snapshot does not end the run, which logs a warning.

    Args:
        settings: section `checkpoint`; its contents and retention do not apply.
        config_text: the resolved configuration.
    """

    def __init__(
        self,
        run_dir: Path,
        settings: CheckpointConfig,
        config_text: str,
        identity: Identity,
        coordinator: Coordinator,
        state: RunState,
    ) -> None:
        self._run_dir, self._memory = run_dir, settings.memory
        self._settings = replace(settings, contents=list(STATE), max_to_keep=SNAPSHOTS, keep_every=None, keep_best=0)
        self._text, self._identity, self._state = config_text, identity, state
        folder = memory_folder(settings.memory.dir, run_dir, state.driver.run_id)
        coordinator.everywhere(lambda: make_folder(folder))
        self.place = MemoryPlace(folder, coordinator.with_domains(find_domains(folder, coordinator)))
        self._check_nodes()
        self._background = self.place.coordinator.duplicate(timedelta(seconds=settings.timeout_s))
        self._stager, self._deleter = Stager("checkpoint.memory.freq=0"), Deleter()
        self._in_flight: SaveInFlight | None = None
        # Step of the reference's last change -> the newest snapshot that contains the reference after this change.
        self._reference_at: dict[int, Path] = {}
        self._blocked_s, self._waited_s, self._failures = 0.0, 0.0, 0
        self._result: SaveResult | None = None

    def _check_nodes(self) -> None:
        ranks, replicas = self.place.coordinator, self._memory.replicas
        nodes = len(ranks.domain_leaders)
        machines = math.ceil(ranks.world_size / int(os.environ.get(LOCAL_WORLD_SIZE, ranks.world_size)))
        if replicas >= nodes == machines:  # launcher.min_nodes: the run has fewer machines than trainer.nnodes
            if ranks.is_leader:
                log.warning(
                    "checkpoint.memory.replicas=%d: the run has %d of its machines now, and makes %d copies.",
                    replicas,
                    nodes,
                    nodes - 1,
                )
            self._memory = replace(self._memory, replicas=nodes - 1)
        elif replicas >= nodes:
            raise UserError(
                f"checkpoint.memory.replicas={replicas}: each copy needs the memory of another node, but the ranks see "
                f"only {nodes} separate folder{'s' if nodes > 1 else ''} {self.place.folder.parent}. Set "
                f"checkpoint.memory.replicas={nodes - 1}, or checkpoint.memory.dir to a folder that nodes do not share."
            )

    def check_room(self) -> None:
        """Raise UserError on every rank if a node lacks memory for the snapshots. Call before the first snapshot."""
        ranks, size, replicas = self.place.coordinator, self._state.copied_bytes(STATE), self._memory.replicas
        here = 0
        for own, node in zip(ranks.all_gather(size), ranks.domains, strict=True):
            here += own * (ranks.domain in (node, *copied_to(node, ranks.domain_leaders, replicas)))
        needed = (SNAPSHOTS + 1) * here
        ranks.on_domain_leaders(lambda: check_room(self._memory.dir, self._run_dir, needed, replicas))
        existing = sum(1 for _ in scan(self.place.folder))
        written = max(1, SNAPSHOTS + 1 - existing) * here if ranks.leads_domain else 0
        reason = (
            f"checkpoint.memory.freq={self._memory.freq}: for {SNAPSHOTS} snapshots, the snapshot being written"
            f"{copies_text(replicas)} and the copy of the state from which it is written"
        )
        check_memory(size + written, ranks, reason, less_memory(replicas))

    def tidy(self) -> None:
        """Complete an interrupted publication, and remove leftovers of killed snapshots."""
        self.settle()
        ranks, folder = self.place.coordinator, self.place.folder
        ranks.on_domain_leaders(lambda: self._deleter.wait(self._settings.timeout_s))
        roll_forward(folder, ranks)
        ranks.on_domain_leaders(lambda: clean_leftovers(folder))

    def forget(self, after: int) -> None:
        """Remove the snapshots of steps later than `after`, which the run repeats or has rejected."""
        folder, self._reference_at = self.place.folder, {}

        def remove() -> None:
            later = [path for path in scan(folder) if (step_of(path) or 0) > after]
            remove_checkpoints(later, self._deleter)

        self.place.coordinator.on_domain_leaders(remove)

    def finish(self) -> None:
        """Wait for the snapshot in flight and for removals."""
        self.settle()
        self._deleter.wait(self._settings.timeout_s)

    def drop(self) -> None:
        """Remove all snapshots. A run that has ended, or has saved its state, does not need them."""
        self.settle()
        self.forget(after=-1)
        self.tidy()

    def take(self, step: int, metrics: Mapping[str, float]) -> None:
        """Publish a snapshot of `step` if one is due. First wait for the previous snapshot."""
        if step % self._memory.freq:
            return
        called = time.monotonic()
        self.settle()
        announce("memory.snapshot")
        started = time.monotonic()
        reference = self._state.reference
        updated_at = None if reference is None else reference.updated_at
        unchanged = None if updated_at is None else self._reference_at.get(updated_at)
        rank = self.place.coordinator.rank
        snapshot = take_snapshot(step, self._settings.contents, self._state, self._text, rank, unchanged, metrics)
        try:
            # Create the folder again if it is gone: systemd empties /dev/shm when a user logs out.
            self.place.coordinator.on_domain_leaders(lambda: make_folder(self.place.folder))
            pending = begin_checkpoint(snapshot, self.place.folder, self.place.coordinator)
        except (SaveFailed, UserError) as error:
            self._failed(error)
            return
        staged = self._stager.copy(snapshot, pending.linked)

        def write() -> SaveResult:
            arguments = self.place.folder, self._identity, self._background, self._settings, self._deleter, pending
            result = write_checkpoint(staged, *arguments, copies=self._memory.replicas)
            return replace(result, seconds=time.monotonic() - started)

        self._in_flight = SaveInFlight(step, updated_at, self._settings.timeout_s, name="memory")
        self._in_flight.start(write)
        self._blocked_s, self._waited_s = time.monotonic() - called, started - called

    def settle(self) -> None:
        """Wait for the snapshot in flight. If a rank is gone, raise LostPeer, or SaveFailed with LostPeer as its cause.
        Log other failed saves."""
        if (save := self._in_flight) is None:
            return
        self._in_flight = None
        try:
            self._result = save.wait()
        except SaveFailed as error:
            self._failed(error)
            return
        self._reference_at = {} if save.reference_at is None else {save.reference_at: self._result.path}

    def _failed(self, error: SaveFailed | UserError) -> None:
        if isinstance(error.__cause__, LostPeer):
            raise error
        self._failures += 1
        if self.place.coordinator.is_leader:
            log.warning("Snapshot in memory: %s The run goes on; a crash now repeats more steps.", error)

    def wait_for_end(self, seconds: float) -> None:
        """Wait at most `seconds` until the snapshot in flight has succeeded or failed."""
        if self._in_flight is not None:
            self._in_flight.wait_for_end(seconds)

    def metrics(self) -> dict[str, float]:
        """Return the training's wait for the last snapshot, the size and time of the last publication, and failures."""
        published = (
            {}
            if self._result is None
            else {
                "perf/memory_seconds": self._result.seconds,
                "perf/memory_bytes": float(self._result.total_bytes),
            }
        )
        return published | {
            "timing_s/memory_snapshot": self._blocked_s,
            "perf/memory_wait_seconds": self._waited_s,
            "perf/memory_failures": float(self._failures),
        }
