"""Prepares a run's directories before the start, one in each storage domain. Imports no torch.

Since the last start, nodes may have been swapped or killed during a commit, or may have a new, empty disk.
"""

import logging
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rlhf.checkpoint.commit.pointer import point_to_newest
from rlhf.checkpoint.commit.publication import roll_forward
from rlhf.checkpoint.load.locations import locate_files, published, reject_lost
from rlhf.checkpoint.load.verification import damage_of
from rlhf.checkpoint.remote.lease import acquire_lease
from rlhf.checkpoint.remote.remote_start import claim_at_start, open_remote, restore
from rlhf.checkpoint.remote.remote_store import RemoteStore
from rlhf.checkpoint.start import run_dir as directory
from rlhf.checkpoint.start.comparison import check_same_run, compare_finished
from rlhf.checkpoint.state.run_file import AGENTS, STARTED_ON, read_run_file, write_run_file
from rlhf.config.compare import ResolvedConfig
from rlhf.config.schema.checkpoint import CheckpointConfig
from rlhf.config.schema.trainer import TrainerConfig
from rlhf.errors import UserError
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.parent import LAUNCH, torchrun_agent
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.files import append_durably, remove_file, rename_durably
from rlhf.storage.layout import CONFIG, HISTORY, TEMPORARY, step_of

log = logging.getLogger(__name__)
PART = 4 << 20
"""Bytes sent from node to node at a time."""


def prepare(
    run_dir: Path, trainer: TrainerConfig, settings: CheckpointConfig, config: ResolvedConfig, coordinator: Coordinator
) -> None:
    """Prepare the run directory of each storage domain for the ranks. Collective; raises the same error on every rank.

    The caller has the run lock of every directory. Raises UserError for `trainer.resume_mode=disable` on a directory
    with checkpoints, for checkpoints of a run with other settings, for a `trainer.resume_from_path` that is not a
    checkpoint, for a `checkpoint.remote` that cannot be used, for lost checkpoints (`reject_lost`), for
    a damaged run.json, and for a metric history or event file with a second hard link.
    """
    if settings.remote is not None and len(coordinator.domain_leaders) > 1:
        raise UserError(
            f"checkpoint.remote={settings.remote} needs a run directory that all nodes share, but the nodes have disks "
            "of their own. Set checkpoint.remote=null, or trainer.default_local_dir to a folder that all nodes share."
        )
    source = directory.resume_source(trainer)
    remote: RemoteStore | None = None

    def open_and_lease() -> None:
        nonlocal remote
        remote = open_remote(run_dir, trainer, settings)
        if remote is not None:
            acquire_lease(remote, run_dir)

    launch = _launch(run_dir, coordinator)
    coordinator.on_domain_leaders(lambda: directory.make(run_dir, trainer, launch))
    roll_forward(run_dir, coordinator)
    coordinator.on_domain_leaders(lambda: directory.tidy(run_dir, trainer, launch))
    if trainer.resume_mode == "disable":
        coordinator.on_domain_leaders(lambda: directory.forget_snapshots(run_dir, settings.memory.dir, launch))
    if settings.remote is not None:
        coordinator.on_leader(open_and_lease)
        restore(remote, run_dir, trainer, source, coordinator)
    run = _agreed_run(run_dir, coordinator)
    forks = source is not None and coordinator.broadcast(str(source)) != run.get("resumed_from")
    if not forks:
        reject_lost(run_dir, coordinator)
        if source is None and trainer.resume_mode == "auto":
            _reject_lost_source(run_dir, run, coordinator)
    if published(run_dir, coordinator):
        coordinator.on_domain_leaders(lambda: point_to_newest(run_dir))
    check_same_run(run_dir, trainer, config, run.get("resumed_from"), coordinator)
    _download_history(run_dir, run["run_id"], coordinator)
    if source is not None and forks:
        run |= _fork(run_dir, source, coordinator)
    run.pop(AGENTS, None)
    if trainer.overwrite or trainer.resume_mode == "disable":
        run |= {AGENTS: launch} if launch else {}
    coordinator.on_domain_leaders(lambda: write_run_file(run_dir, run))
    coordinator.on_leader(lambda: None if remote is None else claim_at_start(remote, run_dir, trainer))


def _reject_lost_source(run_dir: Path, run: Mapping[str, Any], coordinator: Coordinator) -> None:
    """Raise UserError if the run is a fork without a checkpoint of its own: the fork can only restart at its source."""
    if (source := run.get("resumed_from")) is not None and not published(run_dir, coordinator):
        raise UserError(
            f"the run in {run_dir} began at {source} and has saved no checkpoint of its own. To continue it, add "
            f"trainer.resume_mode=resume_path trainer.resume_from_path={source}. To begin at step 0, add "
            "trainer.overwrite=true."
        )


def finished_step(
    run_dir: Path, trainer: TrainerConfig, config: ResolvedConfig, coordinator: Coordinator
) -> int | None:
    """Return the last step of a finished and intact run that has passed `check_same_run`, else None. Collective. Raises
    UserError if the finished run had another model, or other files of users' functions."""
    for path in published(run_dir, coordinator):
        try:
            located = locate_files(path, coordinator)
        except DamagedCheckpoint:
            return None
        if located.missing:
            continue
        drivers = coordinator.on_domain_leaders(lambda: directory.driver_state_of(path))  # noqa: B023
        driver = next((driver for driver in drivers if driver is not None), None)
        if located.manifest.imported or driver is None or not directory.at_end(trainer, driver):
            return None
        # Read all bytes only if the run is finished; the ranks of an unfinished run verify the bytes in parallel.
        own = [name for name in located.manifest.files if located.source_domain(name) == coordinator.domain]
        if damage_of(located, own, coordinator):
            return None
        compare = partial(compare_finished, path, located.manifest, config)
        for line in coordinator.on_rank(located.source_domain(CONFIG), compare):
            if coordinator.is_leader:
                log.info("The run is finished; %s", line)
        return driver["step"]
    return None


def _launch(run_dir: Path, coordinator: Coordinator) -> list[str]:
    """Return the names of this launch: a scheduler's job, or the torchrun processes; empty if there is neither.

    The torchrun processes are the parents of the present ranks. A new attempt may run on other machines. So the result
    also has earlier attempts' names from each run.json that lists a present name.
    """
    own = os.environ.get(LAUNCH) or torchrun_agent()
    agents = {agent for agent in coordinator.all_gather(own) if agent is not None}
    if not agents:
        return []
    for known in coordinator.on_domain_leaders(lambda: read_run_file(run_dir).get(AGENTS, [])):
        agents |= set(known) if not agents.isdisjoint(known) else set()
    return sorted(agents)


def _agreed_run(run_dir: Path, coordinator: Coordinator) -> dict[str, Any]:
    """Return the run's id and start day. Sources, in this order: run.json on the driver's disk, run.json on another
    disk, the newest checkpoint, new values. If run.json lacks the start day, the last two sources give it."""
    known = [run for run in coordinator.on_domain_leaders(lambda: read_run_file(run_dir)) if run]
    if len({run["run_id"] for run in known}) > 1 and coordinator.is_leader:
        names = ", ".join(run["run_id"] for run in known)
        log.warning(
            "The nodes' disks have different runs (run_id in run.json: %s); continuing as run %s.",
            names,
            known[0]["run_id"],
        )
    saved = next((run for run in coordinator.on_domain_leaders(lambda: directory.newest_run(run_dir)) if run), {})
    new = coordinator.on_leader(lambda: {"run_id": directory.new_run_id(), STARTED_ON: directory.today()})
    return new | saved | (known[0] if known else {})


def _download_history(run_dir: Path, run_id: str, coordinator: Coordinator) -> None:
    """Move the longest metric history, from the disk that rank 0 had at the last start, to rank 0's present disk."""
    if len(coordinator.domain_leaders) == 1:
        return
    path = run_dir / HISTORY

    def length() -> int:
        of_this_run = read_run_file(run_dir).get("run_id", run_id) == run_id
        return path.stat().st_size if of_this_run and path.exists() else 0

    lengths = dict(zip(coordinator.domain_leaders, coordinator.on_domain_leaders(length), strict=True))
    longest = max(lengths, key=lambda domain: (lengths[domain], -domain))
    if longest != 0:
        _move_to_driver(path, longest, lengths[longest], coordinator)
    if any(lengths[domain] for domain in lengths if domain != 0):
        # Remove the other histories: after the next swap of nodes, an old history could look like a newer one.
        coordinator.on_domain_leaders(lambda: None if coordinator.is_leader else remove_file(path, missing_ok=True))


def _move_to_driver(path: Path, domain: int, size: int, coordinator: Coordinator) -> None:
    """Send the first `size` bytes of the file `path` of another domain to the driver's disk, in parts."""
    fresh = path.with_name(f"{TEMPORARY}{path.name}")
    coordinator.on_leader(lambda: remove_file(fresh, missing_ok=True))
    for start in range(0, size, PART):

        def read(start: int = start) -> bytes:
            with path.open("rb") as file:
                file.seek(start)
                return file.read(min(PART, size - start))

        content = coordinator.on_rank(domain, read)
        coordinator.on_leader(partial(append_durably, fresh, [content]))
    coordinator.on_leader(lambda: rename_durably(fresh, path))
    if coordinator.is_leader:
        log.info("Copied the metric history from another node's disk to the driver's disk.")


def _fork(run_dir: Path, source: Path, coordinator: Coordinator) -> dict[str, Any]:
    """Set aside the old records and checkpoints (`set_aside_for`); return the new run's entries in run.json.

    Raises UserError if `source` is not the directory of a checkpoint.
    """
    if not any(coordinator.on_domain_leaders(lambda: step_of(source) is not None and source.is_dir())):
        raise UserError(f"trainer.resume_from_path={source} is not a checkpoint: name a global_step_N directory.")
    drivers = coordinator.on_domain_leaders(lambda: directory.driver_state_of(source))
    coordinator.on_domain_leaders(lambda: directory.set_aside_for(run_dir, source))
    days = [(driver or {}).get(STARTED_ON) for driver in drivers]
    # Make a new id: with the old id, trackers would drop steps that the old trajectory has logged.
    fork = coordinator.on_leader(lambda: {"resumed_from": str(source), "run_id": directory.new_run_id()})
    # Keep the start day of the source, because chat templates must print the same date as in the source's run.
    return fork | {STARTED_ON: next((day for day in days if day), None) or coordinator.on_leader(directory.today)}
