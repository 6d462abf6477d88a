"""Creates, empties or rejects the run directory before the ranks start; cleans up after a kill. Imports no torch."""

import logging
import math
import uuid
from collections.abc import Collection
from datetime import date
from pathlib import Path
from typing import Any

from rlhf.checkpoint.commit.manifest import read_manifest
from rlhf.checkpoint.commit.output_folder import remove_leftovers
from rlhf.checkpoint.commit.pointer import point_to, point_to_newest
from rlhf.checkpoint.commit.removal import clean_leftovers, discard, set_aside
from rlhf.checkpoint.remote.upload_links import remove_upload_links
from rlhf.checkpoint.state.driver_state import parse_driver_state
from rlhf.checkpoint.state.run_file import AGENTS, STARTED_ON, read_run_file
from rlhf.config.schema.trainer import TrainerConfig
from rlhf.errors import UserError
from rlhf.ranks.memory_folder import remove_abandoned
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.files import make_dir_durably, remove_file
from rlhf.storage.layout import (
    ALERTS,
    DRIVER_STATE,
    EVENTS,
    HF_FOLDER,
    HISTORY,
    RESOLVED,
    RUN_FILE,
    SAMPLES,
    STEP_PREFIX,
    TEMPORARY,
    TRASH,
    UPLOAD,
    scan,
    step_of,
)
from rlhf.storage.reading import CheckedFiles

log = logging.getLogger(__name__)
LOCKS = ("run.lock", "ranks.lock")
RECORDED = (HISTORY, EVENTS, ALERTS, SAMPLES, "tensorboard", "report", HF_FOLDER)
"""Files and folders with records of one run, except checkpoints. Their names lack the run's id, unlike wandb's."""


def make(run_dir: Path, trainer: TrainerConfig, launch: Collection[str]) -> None:
    """Create the directory. Empty it, except for locks, if this `launch` overwrites the run and has not done so yet.

    Raises:
        UserError: the directory to empty has files, but none of a run.
    """
    make_dir_durably(run_dir)
    if trainer.overwrite and not prepared_by(launch, run_dir):
        _reject_other_files(run_dir)
        if existing := scan(run_dir):
            log.warning(
                "trainer.overwrite=true: deleting the checkpoints up to step %s of %s.", step_of(existing[0]), run_dir
            )
        point_to(run_dir, None)  # remove the pointer first, which must never name a removed checkpoint
        # Remove run.json last: after a kill, it shows the next start that the rest belongs to a run.
        for path in sorted(run_dir.iterdir(), key=lambda path: (path.name == RUN_FILE, path.name)):
            if path.name not in LOCKS:
                if path.is_dir() and not path.is_symlink():
                    discard(path)
                else:
                    remove_file(path)


def _reject_other_files(run_dir: Path) -> None:
    """Raise UserError if the directory has files, except for locks, and no run has written them."""
    own = (TEMPORARY, TRASH, UPLOAD)  # a start that was killed may have written nothing else
    names = sorted(path.name for path in run_dir.iterdir() if path.name not in LOCKS and not path.name.startswith(own))
    if names and not any(name in (RUN_FILE, RESOLVED) or name.startswith(STEP_PREFIX) for name in names):
        raise UserError(
            f"trainer.overwrite=true: would delete {names[0]} and all else in {run_dir}, which is not a run: it has no "
            f"{RUN_FILE}, {RESOLVED} or {STEP_PREFIX}N. Set another trainer.experiment_name, or empty the folder."
        )


def tidy(run_dir: Path, trainer: TrainerConfig, launch: Collection[str]) -> None:
    """Remove what an interrupted save, upload or export left; raise like `reject_earlier` and `reject_shared`."""
    if removed := clean_leftovers(run_dir):
        log.info("Removed what an interrupted save left behind: %s", ", ".join(removed))
    try:
        remove_leftovers(run_dir / HF_FOLDER)
    except OSError as error:
        log.error("An interrupted export in %s could not be removed (%s); the next start tries again.", run_dir, error)
    reject_earlier(run_dir, trainer, launch)
    reject_shared(run_dir)
    remove_upload_links(run_dir)


def reject_shared(run_dir: Path) -> None:
    """Raise UserError if a file to which the run appends has a second hard link in another folder."""
    for path in (run_dir / HISTORY, run_dir / EVENTS):
        if path.exists() and path.stat().st_nlink > 1:
            raise UserError(
                f"{path} is a hard link to a file of another folder (a copy by cp -al or cp -l?), and this run would "
                "change the file there. Copy the folder by cp -a instead."
            )


def reject_earlier(run_dir: Path, trainer: TrainerConfig, launch: Collection[str] = ()) -> None:
    """Raise UserError for `resume_mode=disable` on a directory with checkpoints that are not of this `launch`."""
    rejects = trainer.resume_mode == "disable" and not trainer.overwrite
    if rejects and not prepared_by(launch, run_dir) and (existing := scan(run_dir)):
        raise UserError(
            f"trainer.resume_mode=disable, but {run_dir} holds checkpoints up to step {step_of(existing[0])}. Set "
            "trainer.overwrite=true to delete them, trainer.experiment_name to something new, or "
            "trainer.resume_mode=auto to continue."
        )


def forget_snapshots(run_dir: Path, memory: str, launch: Collection[str]) -> None:
    """Remove an earlier launch's snapshots below `memory` (`checkpoint.memory.dir`), for
    `trainer.resume_mode=disable`."""
    if not prepared_by(launch, run_dir):
        remove_abandoned(memory, run_dir)


def prepared_by(launch: Collection[str], run_dir: Path) -> bool:
    """Return whether an earlier attempt of this launch prepared the directory. `launch` has the launch's names: a
    scheduler's job, or the torchrun processes. Under torchrun, ranks prepare the directory again at each restart, but
    must keep the checkpoints of the launch's earlier attempts."""
    return bool(launch) and not set(launch).isdisjoint(read_run_file(run_dir).get(AGENTS, ()))


def set_aside_for(run_dir: Path, source: Path) -> None:
    """Set aside the run's records and the checkpoints later than `source`: the run starts again from `source`. Set
    aside all checkpoints if `source` is in another directory."""
    for path in scan(run_dir):
        if source.parent != run_dir.resolve() or (step_of(path) or 0) > (step_of(source) or 0):
            aside = set_aside(path, "superseded").name
            log.warning("%s is set aside as %s: the run starts again from %s.", path, aside, source)
    point_to_newest(run_dir)
    for path in (run_dir / name for name in RECORDED):
        if path.exists():
            log.info("%s is set aside as %s.", path, set_aside(path, "superseded").name)


def new_run_id() -> str:
    return uuid.uuid4().hex[:12]


def newest_run(run_dir: Path) -> dict[str, Any]:
    """Return run.json's entries from the newest checkpoint with an intact driver state; empty if there is none."""
    state = next((state for path in scan(run_dir) if (state := driver_state_of(path)) is not None), {})
    return {key: state[key] for key in ("run_id", STARTED_ON) if state.get(key) is not None}


def today() -> str:
    return date.today().isoformat()


def driver_state_of(path: Path) -> dict[str, Any] | None:
    """Return the driver state of a checkpoint, or None if the manifest or the driver state is damaged."""
    try:
        manifest = read_manifest(path)
        content = CheckedFiles(path, manifest.files).content(DRIVER_STATE)
        return parse_driver_state(content, DRIVER_STATE, manifest.step)
    except DamagedCheckpoint:
        return None


def resume_source(trainer: TrainerConfig) -> Path | None:
    """Return the absolute `trainer.resume_from_path` if `resume_mode` is `resume_path`, else None."""
    if trainer.resume_mode != "resume_path":
        return None
    # Resolve ".." and links, so that a path into the run's own directory does not look like another run's path.
    path = Path(trainer.resume_from_path or "").expanduser().absolute()
    return path.parent.resolve() / path.name


def planned_steps(trainer: TrainerConfig, steps_per_epoch: float) -> int:
    """Return the largest number of steps of a run: `trainer.total_training_steps`, or the number of whole batches in
    `total_epochs` epochs."""
    explicit = trainer.total_training_steps
    return explicit if explicit is not None else max(1, math.floor(trainer.total_epochs * steps_per_epoch))


def at_end(trainer: TrainerConfig, driver: dict[str, Any]) -> bool:
    """Return whether a stored driver state is at the run's last step, by its steps or by its epochs."""
    if driver["step"] >= planned_steps(trainer, driver["steps_per_epoch"]):
        return True
    return trainer.total_training_steps is None and driver["epochs"] >= trainer.total_epochs
