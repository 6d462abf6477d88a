"""Tests the remote folder at the start of a run, claims it, and restores checkpoints that the disk lacks."""

import errno
import json
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from rlhf.checkpoint.remote.download import CHECK_S, DOWNLOAD_S, download, unreadable_message
from rlhf.checkpoint.remote.remote_store import Copy, RemoteStore, remote_url
from rlhf.checkpoint.remote.retries import Retries, one_line, silence_as_warning
from rlhf.checkpoint.state.run_file import read_run_file
from rlhf.config.schema.checkpoint import CheckpointConfig
from rlhf.config.schema.trainer import TrainerConfig
from rlhf.errors import UserError
from rlhf.ranks.coordinator import Coordinator
from rlhf.storage.layout import RUN_FILE, scan

log = logging.getLogger(__name__)
FIXED_BY_USERS = (ImportError, ValueError, PermissionError, FileNotFoundError, NotADirectoryError)


def open_remote(run_dir: Path, trainer: TrainerConfig, settings: CheckpointConfig) -> RemoteStore | None:
    """Return the remote folder after a test write, or None without `checkpoint.remote`.

    If the remote does not answer and the run directory has checkpoints, log a warning and return None.

    Raises:
        UserError: only the user can fix the error; or the remote does not answer and the run directory has no
            checkpoints, so the run would start at step 0 although the remote may have checkpoints.
    """
    remote = settings.remote
    if remote is None:
        return None
    if remote.startswith("file://"):
        target = Path(remote_url(trainer, settings).removeprefix("file://")).resolve()
        if run_dir.resolve() in (target, *target.parents):
            raise UserError(
                f"checkpoint.remote={remote}: this folder is in the run directory {run_dir}. "
                "Set a folder outside the run directory, best on another disk."
            )
    retries = Retries(f"checkpoint.remote={remote}", stalled_s=CHECK_S, give_up_s=CHECK_S)
    try:
        store = retries.call("opening", partial(RemoteStore, remote_url(trainer, settings)), final=(Exception,))
        retries.call("writing", store.check, final=FIXED_BY_USERS)
    except Exception as error:
        if not _needs_user(error) and scan(run_dir):
            log.warning(
                "checkpoint.remote=%s does not answer (%s); training goes on and tries again.", remote, one_line(error)
            )
            return None
        raise UserError(
            f"checkpoint.remote={remote}: a small file cannot be written and removed there ({one_line(error)}). Check "
            "the name, the credentials in the environment, the permissions and the network, or set "
            "checkpoint.remote=null."
        ) from error
    return store


def _needs_user(error: Exception) -> bool:
    read_only = isinstance(error, OSError) and error.errno == errno.EROFS
    # Object stores' clients have their own classes for missing credentials.
    return isinstance(error, FIXED_BY_USERS) or read_only or "Credential" in type(error).__name__


def restore(
    store: RemoteStore | None, run_dir: Path, trainer: TrainerConfig, source: Path | None, coordinator: Coordinator
) -> int | None:
    """Download the newest intact remote checkpoint, run.json and the history into a run directory without checkpoints.

    Return the checkpoint's step. Change nothing and return None if the directory has checkpoints, the run starts anew,
    or the remote has no checkpoints of this run. Call this before run.json is written. Collective over the ranks that
    share the directory.

    Args:
        store: the remote on the leader; other ranks pass None.
        source: the checkpoint that a fork begins from.

    Raises:
        UserError: all remote checkpoints are damaged, the remote stops answering, or the disk fails.
    """
    url = coordinator.on_leader(lambda: None if store is None else store.url)
    if url is None:
        return None
    copies = iter(()) if store is None else _copies_to_try(store, run_dir, trainer, source)
    while (copy := coordinator.on_leader(lambda: next(copies, None))) is not None:
        if download(url, copy, run_dir, coordinator):
            return copy.step
    return None


def _copies_to_try(store: RemoteStore, run_dir: Path, trainer: TrainerConfig, source: Path | None) -> Iterator[Copy]:
    """Yield this run's copies, newest first. The caller requests the next copy only if the previous copy was damaged.

    Raises UserError if all copies are damaged, or if the remote cannot be read.
    """
    own = read_run_file(run_dir)
    if scan(run_dir) or trainer.resume_mode == "disable" or (trainer.overwrite and not own):
        return
    retries = Retries(store.url, stalled_s=DOWNLOAD_S, give_up_s=DOWNLOAD_S)
    damaged = 0
    try:
        owner = _owner(store, retries)
        if not owner or (own and own["run_id"] != owner["run_id"]):
            return
        if source is not None and owner.get("resumed_from") != str(source):
            return  # another fork's folder; this fork begins at its source
        for step in retries.call("listing", store.steps):
            copy = retries.call(f"reading step {step}", partial(store.copy, step))
            if copy is None and not retries.call(f"reading step {step}", partial(store.is_partial, step)):
                log.error("%s: step %d has no valid manifest; falling back to the copy before it.", store.url, step)
                damaged += 1
            elif copy is not None and copy.run_id == owner["run_id"]:
                yield copy
                damaged += 1
    except Exception as error:
        raise UserError(unreadable_message(store.url, one_line(error))) from error
    if damaged:
        raise UserError(
            f"Every checkpoint in {store.url} is damaged, and the run will not start again at step 0 by itself. Start "
            "anew with trainer.overwrite=true or another trainer.experiment_name."
        )


def _owner(store: RemoteStore, retries: Retries) -> dict[str, Any]:
    """Return the run.json of the folder, or else the run id of its newest copy. Empty if no run owns the folder."""
    run = retries.call("reading run.json", store.run, final=FIXED_BY_USERS)
    if "run_id" in run:
        return run
    return next(({"run_id": copy.run_id} for copy in complete_copies(store, retries) if copy.run_id is not None), {})


def complete_copies(store: RemoteStore, retries: Retries) -> Iterator[Copy]:
    """Yield the complete remote checkpoints of any run, newest first."""
    for step in retries.call("listing", store.steps):
        copy = retries.call(f"reading step {step}", partial(store.copy, step))
        if copy is not None:
            yield copy


def claim_at_start(store: RemoteStore, run_dir: Path, trainer: TrainerConfig) -> None:
    """Claim the folder before the ranks start. If the remote does not answer, only log a warning: the thread that
    copies checkpoints claims the folder again."""
    with silence_as_warning(store.url):
        claim(store, run_dir, trainer, Retries(store.url, stalled_s=CHECK_S, give_up_s=CHECK_S))


def claim(store: RemoteStore, run_dir: Path, trainer: TrainerConfig, retries: Retries) -> None:
    """Make the run of `run_dir` the owner of the remote folder by writing the run's run.json there.

    Raises UserError if the folder has checkpoints of another run, unless this run is a fork or has `trainer.overwrite`.
    """
    own = read_run_file(run_dir)
    if retries.call("reading run.json", store.run) == own:
        return
    owner = _owner(store, retries)
    if owner and owner["run_id"] != own["run_id"] and "resumed_from" not in own and not trainer.overwrite:
        newest = next((copy for copy in complete_copies(store, retries) if copy.run_id == owner["run_id"]), None)
        if newest is not None:
            raise UserError(
                f"checkpoint.remote: {store.url} holds checkpoints of another run, up to step {newest.step}. Set "
                "another trainer.experiment_name or checkpoint.remote; or, to continue that run, start in an empty "
                "run directory with trainer.resume_mode=auto; or replace it with trainer.overwrite=true."
            )
    retries.call("writing run.json", partial(store.write, RUN_FILE, [json.dumps(own).encode() + b"\n"]))
