"""Remote folder at the start of a run: it is tried, claimed, and asked for the checkpoints that the disk lacks."""

import errno
import json
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from rlhf.checkpoint.remote.download import CHECK_S, DOWNLOAD_S, download, unreadable
from rlhf.checkpoint.remote.remote_store import Copy, RemoteStore, remote_url
from rlhf.checkpoint.remote.retries import Retries, one_line
from rlhf.checkpoint.state.run_file import read_run_file
from rlhf.config.schema.checkpoint import CheckpointConfig
from rlhf.config.schema.trainer import TrainerConfig
from rlhf.errors import UserError
from rlhf.ranks.coordinator import Coordinator
from rlhf.storage.layout import RUN_FILE, scan

log = logging.getLogger(__name__)
FIXED_BY_USERS = (ImportError, ValueError, PermissionError, FileNotFoundError, NotADirectoryError)


def open_remote(run_dir: Path, trainer: TrainerConfig, settings: CheckpointConfig) -> RemoteStore | None:
    """Return the remote folder after a test write; None without `checkpoint.remote`.

    If the remote does not answer, log that and return None, provided the run directory has checkpoints.

    Raises:
        UserError: the user must fix something; or the remote does not answer and the run directory has no checkpoints,
            so that the remote's decide where the run begins.
    """
    remote = settings.remote
    if remote is None:
        return None
    if remote.startswith("file://"):
        _keep_apart(run_dir, trainer, remote)
    retries = Retries(f"checkpoint.remote={remote}", stalled_s=CHECK_S, give_up_s=CHECK_S)
    try:
        store = retries.call("opening", partial(RemoteStore, remote_url(trainer, settings)), final=(Exception,))
        retries.call("writing", store.check, final=FIXED_BY_USERS)
    except Exception as error:
        if not _needs_a_person(error) and scan(run_dir):
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


def _needs_a_person(error: Exception) -> bool:
    read_only = isinstance(error, OSError) and error.errno == errno.EROFS
    # The clients of the object stores have classes of their own for credentials that are missing.
    return isinstance(error, FIXED_BY_USERS) or read_only or "Credential" in type(error).__name__


def _keep_apart(run_dir: Path, trainer: TrainerConfig, remote: str) -> None:
    folder = Path(remote.removeprefix("file://"))
    target = (folder / trainer.project_name / trainer.experiment_name).resolve()
    if target == run_dir.resolve() or run_dir.resolve() in target.parents:
        raise UserError(
            f"checkpoint.remote={remote}: the copies would lie in the run directory {run_dir} itself; "
            "name a folder on another disk."
        )


def restore(
    store: RemoteStore | None, run_dir: Path, trainer: TrainerConfig, source: Path | None, coordinator: Coordinator
) -> int | None:
    """Bring the newest intact remote checkpoint into a run directory that has none, with run.json and the history;
    returns its step. Collective, of ranks that share the directory; `store` is the leader's.

    To be called before the run directory gets a run.json; `source` is the checkpoint that a fork begins from. None, and
    nothing changed, when the directory has checkpoints, when the run is to start anew, or when nothing there is this
    run's. Raises UserError when all that is there is damaged, when the remote falls silent, and when the disk refuses
    what is fetched.
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
    """This run's copies, newest first; a further one is asked for when the last one is damaged. Raises UserError when
    there is none left, and when the remote cannot be read."""
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
            return  # it is of another fork; this one begins at its source
        for step in retries.call("listing", store.steps):
            copy = retries.call(f"reading step {step}", partial(store.copy, step))
            if copy is None and not retries.call(f"reading step {step}", partial(store.is_partial, step)):
                log.error("%s: step %d has no valid manifest; falling back to the copy before it.", store.url, step)
                damaged += 1
            elif copy is not None and copy.run_id == owner["run_id"]:
                yield copy
                damaged += 1
    except Exception as error:
        raise UserError(unreadable(store.url, one_line(error))) from error
    if damaged:
        raise UserError(
            f"Every checkpoint in {store.url} is damaged, and the run will not start again at step 0 by itself. Start "
            "anew with trainer.overwrite=true or another trainer.experiment_name."
        )


def _owner(store: RemoteStore, retries: Retries) -> dict[str, Any]:
    """The run that the folder belongs to, by its run.json or else by the newest copy; empty when it is nobody's."""
    run = retries.call("reading run.json", store.run, final=FIXED_BY_USERS)
    if "run_id" in run:
        return run
    return next(({"run_id": copy.run_id} for copy in complete_copies(store, retries) if copy.run_id is not None), {})


def complete_copies(store: RemoteStore, retries: Retries) -> Iterator[Copy]:
    """The complete checkpoints there, of whatever run, newest first."""
    for step in retries.call("listing", store.steps):
        copy = retries.call(f"reading step {step}", partial(store.copy, step))
        if copy is not None:
            yield copy


def claim_at_start(store: RemoteStore, run_dir: Path, trainer: TrainerConfig) -> None:
    """`claim` before the ranks start; a remote that has fallen silent is left to the copies behind the training, which
    claim it as well."""
    try:
        claim(store, run_dir, trainer, Retries(store.url, stalled_s=CHECK_S, give_up_s=CHECK_S))
    except UserError:
        raise
    except Exception as error:
        log.warning("%s does not answer (%s); training goes on and tries again.", store.url, one_line(error))


def claim(store: RemoteStore, run_dir: Path, trainer: TrainerConfig, retries: Retries) -> None:
    """Make the run of the run directory the one whose checkpoints count there. Its run.json must be there.

    Raises UserError when the folder holds checkpoints of another run and this one was neither forked nor told to
    overwrite.
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
                "run directory with trainer.resume_mode=auto; or take its place with trainer.overwrite=true."
            )
    retries.call("writing run.json", partial(store.write, RUN_FILE, [json.dumps(own).encode() + b"\n"]))
