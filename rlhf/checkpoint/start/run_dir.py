"""The run directory before the ranks start: made, emptied or refused, cleaned of what a kill left, and asked whether it is finished."""

import json
import logging
import math
import os
import uuid
from pathlib import Path
from typing import Any

from rlhf.checkpoint.commit import publication
from rlhf.checkpoint.commit.manifest import read_manifest, verify_files
from rlhf.checkpoint.remote.copies import remove_pins
from rlhf.checkpoint.remote.remote_start import claim_at_start, open_remote, restore
from rlhf.config import Config
from rlhf.errors import UserError
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.files import make_dir_durably, remove_file, replace_durably
from rlhf.storage.layout import DRIVER_STATE, POINTER, RUN_FILE, scan, step_of

log = logging.getLogger(__name__)
LOCKS = ("run.lock", "ranks.lock")


def prepare(config: Config) -> None:
    """Bring the run directory into the state that the ranks expect. For one process that holds the run lock, or the leader of all ranks.

    Raises UserError for `resume_mode=disable` on a directory with checkpoints, and for a `resume_from_path` that is none.
    """
    make(config)
    tidy(config)
    remove_pins(config.run_dir)
    store = open_remote(config)
    if store is not None:
        restore(store, config, resume_source(config))
    run = read_run_file(config.run_dir) or {"run_id": newest_run_id(config.run_dir) or new_run_id()}
    source = resume_source(config)
    if source is not None and str(source) != run.get("resumed_from"):
        if step_of(source) is None or not source.is_dir():
            raise no_source(source)
        set_aside_for(config.run_dir, source)
        run |= forked(source)
    write_run_file(config.run_dir, run)
    if store is not None:
        claim_at_start(store, config)


def make(config: Config) -> None:
    """The directory is there, and empty but for the locks if the run is to overwrite it."""
    run_dir = config.run_dir
    make_dir_durably(run_dir)
    if config.trainer.overwrite and _is_first_attempt():
        if existing := scan(run_dir):
            log.warning(
                "trainer.overwrite=true: deleting the checkpoints up to step %s of %s.", step_of(existing[0]), run_dir
            )
        # The pointer goes first: it never names a checkpoint that is gone.
        for path in sorted(run_dir.iterdir(), key=lambda p: (p.name != POINTER, p.name)):
            if path.name not in LOCKS:
                _remove(path)


def tidy(config: Config) -> None:
    """What an interrupted save left is gone; raises UserError for `resume_mode=disable` on a directory with checkpoints."""
    run_dir = config.run_dir
    if removed := publication.clean_leftovers(run_dir):
        log.info("Removed what an interrupted save left behind: %s", ", ".join(removed))
    if config.trainer.resume_mode == "disable" and _is_first_attempt() and (existing := scan(run_dir)):
        raise UserError(
            f"trainer.resume_mode=disable, but {run_dir} holds checkpoints up to step {step_of(existing[0])}. Set trainer.overwrite=true "
            "to delete them, trainer.experiment_name to something new, or trainer.resume_mode=auto to continue."
        )


def _is_first_attempt() -> bool:
    # A launcher that restarts its ranks (torchrun) repeats all this; what the first attempt saved is ours, not left from before.
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        publication.discard(path)
    else:
        remove_file(path)


def set_aside_for(run_dir: Path, source: Path) -> None:
    """Set aside what does not descend from `source`, from which the run starts again: its own later checkpoints, all of another run's."""
    for path in scan(run_dir):
        if source.parent != run_dir.resolve() or (step_of(path) or 0) > (step_of(source) or 0):
            log.warning(
                "%s is set aside as %s: the run starts again from %s.",
                path,
                publication.set_aside(path, "superseded").name,
                source,
            )


def no_source(source: Path) -> UserError:
    """What to say of a source that is no checkpoint."""
    return UserError(f"trainer.resume_from_path={source} is not a checkpoint: name a global_step_N directory.")


def forked(source: Path) -> dict[str, Any]:
    """The run.json of a run that starts from `source`, once: the same command again goes on from checkpoints of its own."""
    # Trackers would drop the steps that they have already seen of the old course.
    return {"resumed_from": str(source), "run_id": new_run_id()}


def new_run_id() -> str:
    """A random one."""
    return uuid.uuid4().hex[:12]


def newest_run_id(run_dir: Path) -> str | None:
    """The run that the newest checkpoint is of, as far as any can be read."""
    return next((state.get("run_id") for path in scan(run_dir) if (state := driver_state_of(path)) is not None), None)


def driver_state_of(path: Path) -> dict[str, Any] | None:
    """The driver state of a checkpoint, or None unless its bytes are as committed."""
    try:
        manifest = read_manifest(path)
    except DamagedCheckpoint:
        return None
    if verify_files(path, manifest, [DRIVER_STATE]):
        return None
    return json.loads((path / DRIVER_STATE).read_text())


def read_run_file(run_dir: Path) -> dict[str, Any]:
    """The run's identity: `run_id`, and `resumed_from` when it was forked from another checkpoint."""
    path = run_dir / RUN_FILE
    return json.loads(path.read_text()) if path.exists() else {}


def write_run_file(run_dir: Path, run: dict[str, Any]) -> None:
    """Durably, and whole at any moment."""
    replace_durably(run_dir / RUN_FILE, json.dumps(run) + "\n")


def resume_source(config: Config) -> Path | None:
    """The checkpoint to start from when the directory has none of its own: `trainer.resume_from_path`, if asked for."""
    if config.trainer.resume_mode != "resume_path":
        return None
    return _resume_path(config)


def _resume_path(config: Config) -> Path:
    # Resolved, because a detour ("..", a link) into the run's own directory must not look like another run's.
    path = Path(config.trainer.resume_from_path or "").expanduser().absolute()
    return path.parent.resolve() / path.name


def planned_steps(config: Config, steps_per_epoch: float) -> int:
    """Steps in all: `trainer.total_training_steps`, or the epochs' worth."""
    explicit = config.trainer.total_training_steps
    return explicit if explicit is not None else max(1, math.floor(config.trainer.total_epochs * steps_per_epoch))


def finished_step(config: Config) -> int | None:
    """The run's last step if its newest checkpoint has reached it and is intact, else None."""
    newest = next(iter(scan(config.run_dir)), None)
    if newest is None:
        return None
    driver = driver_state_of(newest)
    if driver is None or driver["step"] < planned_steps(config, driver["steps_per_epoch"]):
        return None
    # All bytes are read only when that ends the run; otherwise the ranks verify them, each its share.
    return None if verify_files(newest, read_manifest(newest)) else driver["step"]
