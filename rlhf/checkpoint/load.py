"""Loading one checkpoint: every rank reads what it restores, proves it while it reads, and shares out the proof of the rest."""

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from safetensors.torch import load as load_safetensors
from torch import Tensor

from rlhf.checkpoint.coordinator import Coordinator
from rlhf.checkpoint.errors import DamagedCheckpoint
from rlhf.checkpoint.layout import CARRIED, DRIVER_STATE, REFERENCE, rank_file
from rlhf.checkpoint.manifest import Manifest
from rlhf.checkpoint.reading import CheckedFiles
from rlhf.checkpoint.rng import seed_everything, set_rng_state
from rlhf.checkpoint.snapshot import HF_FOLDER, RunState
from rlhf.checkpoint.tensors import Pieces, TensorReader
from rlhf.errors import UserError

log = logging.getLogger(__name__)
REST = "other"
SCHEDULE = "extra/lr_scheduler.json"


@dataclass(frozen=True)
class Transfer:
    """Bytes read, and the seconds that it took."""

    bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class LoadResult:
    """What was restored, and how long it took from the manifest to the last generator.

    `by_part` has the bytes that all ranks read and the seconds of the slowest one: of each role's tensors, of the reference's (`ref`), and
    of all else that was restored or only proven (`other`).
    """

    path: Path
    manifest: Manifest
    by_part: dict[str, Transfer]
    seconds: float

    @property
    def total_bytes(self) -> int:
        """Bytes that all ranks read."""
        return sum(transfer.bytes for transfer in self.by_part.values())

    def metrics(self) -> dict[str, float]:
        """Bytes, seconds and bytes per second: of all under `perf/load_*`, of each part under `perf/load_*/PART`."""
        named = {"": Transfer(self.total_bytes, self.seconds)}
        named |= {f"/{part}": transfer for part, transfer in self.by_part.items()}
        figures: dict[str, float] = {}
        for name, transfer in named.items():
            figures[f"perf/load_seconds{name}"] = transfer.seconds
            figures[f"perf/load_bytes{name}"] = transfer.bytes
            figures[f"perf/load_bytes_per_second{name}"] = transfer.bytes / max(transfer.seconds, 1e-9)
        return figures


def load_state(
    path: Path, manifest: Manifest, state: RunState, load_contents: list[str], seed: int, coordinator: Coordinator
) -> LoadResult:
    """Put everything of `state` and this rank's generators where a checkpoint has them; in place, so that it can be repeated. Collective.

    Raises DamagedCheckpoint on every rank unless each byte of the checkpoint is as committed: tensors may be overwritten by then, all else
    is untouched. Parts of the driver state that the checkpoint does not know start at their beginning, with a warning.
    """
    started = time.monotonic()
    loading = _Loading(path, manifest, state, load_contents, coordinator.rank, coordinator.world_size)
    found = coordinator.everywhere(loading.read)
    _raise_together(path, found)
    proven = [outcome.checked for outcome in found]
    found = coordinator.everywhere(lambda: loading.prove_rest(proven))
    _raise_together(path, found)
    coordinator.everywhere(lambda: loading.apply(seed))
    ranks = [outcome.transfers for outcome in found]
    by_part = {
        part: Transfer(sum(rank[part].bytes for rank in ranks), max(rank[part].seconds for rank in ranks))
        for part in loading.outcome.transfers
    }
    return LoadResult(path, manifest, by_part, time.monotonic() - started)


@dataclass
class _Outcome:
    """What a rank tells the others: damage, one line each; the blocks that it has proven, by file; what it read so far."""

    damage: list[str] = field(default_factory=list)
    checked: dict[str, set[int]] = field(default_factory=dict)
    transfers: dict[str, Transfer] = field(default_factory=dict)


def _raise_together(path: Path, outcomes: list[_Outcome]) -> None:
    if lines := dict.fromkeys(line for outcome in outcomes for line in outcome.damage):
        raise DamagedCheckpoint(f"{path} is damaged: " + "; ".join(lines))


class _Loading:
    """One rank's part of it. Damage is noted and not raised, so that a rank that meets some makes the same calls as its peers."""

    def __init__(
        self, path: Path, manifest: Manifest, state: RunState, contents: list[str], rank: int, world_size: int
    ) -> None:
        self._path, self._manifest, self._state, self._contents = path, manifest, state, contents
        self._rank, self._world_size = rank, world_size
        self._files = CheckedFiles(path, manifest.files)
        self.outcome = _Outcome(checked=self._files.checked)
        self._documents: dict[str, bytes] = {}

    def read(self) -> _Outcome:
        """Fill the tensors, and read whatever else this rank restores."""
        for name, role in self._state.roles.items():
            if name not in self._manifest.roles:
                raise UserError(f"{self._path} has no {name}; it holds {', '.join(self._manifest.roles)}.")
            setting = "critic.path" if name == "critic" else "model.path"
            with self._part(name):
                if {"model", "hf_model"} & set(self._contents):
                    folder = "model" if "model" in self._contents else HF_FOLDER
                    self._fill(f"{name}/{folder}", role.model_pieces(), f"{name}'s weights", setting)
                if "optimizer" in self._contents:
                    self._fill(f"{name}/optimizer", role.optimizer_pieces(), f"{name}'s optimizer", setting)
        if self._state.reference is not None:
            with self._part("ref"):
                self._fill(REFERENCE, self._state.reference.pieces(), "reference weights", "model.path")
        with self._part(REST):
            for name in self._own_documents():
                with self._noting():
                    self._documents[name] = self._files.content(name)
        return self.outcome

    def prove_rest(self, proven: list[dict[str, set[int]]]) -> _Outcome:
        """Prove this rank's share of what no rank had a use for, given the blocks that each has proven.

        A model that was saved for others to open is damaged if its file is, whatever the run itself reads.
        """
        rest = []
        for name in self._manifest.files:
            done = set().union(*(blocks.get(name, ()) for blocks in proven))
            rest += [(name, block) for block in self._files.blocks(name) if block not in done]
        begin, end = (len(rest) * rank // self._world_size for rank in (self._rank, self._rank + 1))
        share: dict[str, list[int]] = {}
        for name, block in rest[begin:end]:
            share.setdefault(name, []).append(block)
        with self._part(REST):
            for name in list(self._manifest.files)[self._rank :: self._world_size]:
                with self._noting():
                    self._files.check_entry(name)
            for name, blocks in share.items():
                with self._noting():
                    self._files.prove(name, blocks)
        return self.outcome

    def apply(self, seed: int) -> None:
        """Take over what was read."""
        state = self._state
        for role in state.roles.values():
            role.after_load()
        if "extra" in self._contents:
            for name, role in state.roles.items():
                role.load_extra_state(json.loads(self._documents[f"{name}/{SCHEDULE}"]))
        if state.carried is not None:
            state.carried.load_tensors([_tensors(self._documents[name]) for name in self._carried()])
        elif self._manifest.in_folder(CARRIED) and self._rank == 0:
            log.warning(
                "%s has samples carried over to later steps; this run does not carry any, they are dropped.", self._path
            )
        saved = json.loads(self._documents[DRIVER_STATE])
        state.driver.load_state_dict(saved)
        for name, part in state.parts.items():
            if name not in saved and self._rank == 0:
                log.warning("%s has no state of %s, which starts at its beginning.", self._path, name)
            part.load_state_dict(saved[name] if name in saved else json.loads(state.initial_parts[name]))
        # Last: nothing that is loaded may move the generators.
        if "extra" in self._contents:
            self._set_rng(seed)

    def _fill(self, folder: str, pieces: Pieces, what: str, setting: str) -> None:
        with self._noting():
            if PurePosixPath(folder).name == HF_FOLDER:
                # By the manifest, not by what lies there: only those files can be proven.
                files = [f for f in map(PurePosixPath, self._manifest.files) if f.parent == PurePosixPath(folder)]
                weights = [f.name for f in files if f.suffix == ".safetensors"]
                reader = TensorReader.of_whole_tensors(self._files, folder, weights)
            else:
                reader = TensorReader.of_component(self._files, folder)
            if mismatches := reader.mismatches(pieces):
                shown = "; ".join(mismatches[:5]) + (f"; and {len(mismatches) - 5} more" if len(mismatches) > 5 else "")
                raise UserError(f"{what} in {self._path} are of another architecture than {setting}: {shown}.")
            reader.read_into(pieces)

    def _own_documents(self) -> list[str]:
        """The small files that this rank takes over."""
        names = [DRIVER_STATE]
        if self._state.carried is not None:
            names += self._carried()
        if "extra" in self._contents:
            names += [f"{role}/{SCHEDULE}" for role in self._state.roles]
            names += [name for name in [self._rng_file] if name in self._manifest.files]
        return names

    def _carried(self) -> list[str]:
        """What the ranks of the save carried and this one takes over: its own, and at another world size every W-th."""
        saved = range(self._rank, self._manifest.world_size, self._world_size)
        names = [f"{CARRIED}/{rank_file(rank)}" for rank in saved]
        return [name for name in names if name in self._manifest.files]

    @property
    def _rng_file(self) -> str:
        return f"rng/{rank_file(self._rank)}"

    def _set_rng(self, seed: int) -> None:
        if self._rng_file in self._documents:
            set_rng_state(_tensors(self._documents[self._rng_file]))
            return
        log.warning(
            "%s was saved by %d ranks and has no RNG state for rank %d; seeded afresh.",
            self._path,
            self._manifest.world_size,
            self._rank,
        )
        seed_everything(seed + self._manifest.step, self._rank)

    @contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except DamagedCheckpoint as problem:
            self.outcome.damage.append(str(problem))

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        """Add what happens inside to the transfer `name`."""
        before, started = self._files.bytes_read, time.monotonic()
        yield
        known = self.outcome.transfers.get(name, Transfer())
        self.outcome.transfers[name] = Transfer(
            known.bytes + self._files.bytes_read - before, known.seconds + time.monotonic() - started
        )


def _tensors(content: bytes) -> dict[str, Tensor]:
    # Clones: none keeps the bytes of all.
    return {name: tensor.clone() for name, tensor in load_safetensors(content).items()}
