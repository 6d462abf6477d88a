"""Downloads a remote checkpoint into a run directory; all ranks that share the directory fetch a part."""

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from rlhf.checkpoint.commit.publication import begin, publish
from rlhf.checkpoint.remote.remote_store import RUN_FILES, THREADS, Copy, LocalFault, RemoteStore, hash_of, object_name
from rlhf.checkpoint.remote.retries import Retries, Stopped, in_threads, one_line
from rlhf.errors import UserError
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.keep_alive import with_keep_alive
from rlhf.ranks.transport import Transport
from rlhf.storage.disk_errors import DamagedCheckpoint, SaveFailed
from rlhf.storage.files import make_dir, remove_dir, remove_file, rename_durably, write_file
from rlhf.storage.layout import MANIFEST, RUN_FILE, TEMPORARY, fresh_name

log = logging.getLogger(__name__)
CHECK_S = 30.0
"""Seconds after which a rank gives up testing whether it can read the remote."""
DOWNLOAD_S = 600.0
"""Seconds without progress after which a rank gives up retrying a file."""
DISK, NETWORK, DAMAGE, STOPPED = range(4)
"""Reasons why a rank did not fetch its part. The lowest reason of any rank decides for all ranks."""
Fault = tuple[int, str]


def download(url: str, copy: Copy, run_dir: Path, coordinator: Coordinator) -> bool:
    """Download run.json and the metric history, then `copy`, verify every file and publish the checkpoint in `run_dir`.
    Return False if the copy is damaged.

    Collective over the ranks that share the directory. Raises UserError on every rank when the disk fails or the remote
    stops answering.
    """
    fault = _Download(url, copy, run_dir, coordinator).run()
    if fault is None:
        return True
    reason, text = fault
    if reason == DISK:
        raise UserError(_disk_error_message(url, text))
    if reason != DAMAGE:
        raise UserError(unreadable_message(url, text))
    if coordinator.is_leader:
        log.error("%s; falling back to the copy before it.", text)
    return False


class _Download:
    """Downloads one copy into a run directory. The files are divided among the ranks that can read the remote."""

    def __init__(self, url: str, copy: Copy, run_dir: Path, coordinator: Coordinator) -> None:
        self._url, self._copy, self._run_dir, self._coordinator = url, copy, run_dir, coordinator
        self._retries = Retries(url, stalled_s=DOWNLOAD_S, give_up_s=DOWNLOAD_S)
        self._store: RemoteStore | None = None
        self._run_files: list[str] = []

    def run(self) -> Fault | None:
        """Fetch, verify and publish; return the fault that decides for all ranks. Collective."""
        self._temporary, self._beside = self._coordinator.on_leader(self._make)
        able = [rank for rank, reaches in enumerate(self._coordinator.everywhere(self._reach)) if reaches]
        files = sorted(self._copy.manifest.files.items(), key=lambda item: (-item[1]["size"], item[0]))
        mine = files[able.index(self._coordinator.rank) :: len(able)] if self._store is not None else []
        own = with_keep_alive(
            partial(self._fetch, mine), lambda fault: fault is not None, self._retries.stop, self._coordinator
        )
        return self._coordinator.combine(lambda: own, self._end)

    def _make(self) -> tuple[Path, Path]:
        log.info("Fetching step %d from %s.", self._copy.step, self._url)
        try:
            make_dir(self._run_dir)
            return begin(self._run_dir, self._copy.step), self._run_dir / fresh_name(TEMPORARY, "run")
        except OSError as error:
            raise UserError(_disk_error_message(self._url, str(error))) from error

    def _reach(self) -> bool:
        self._store = _reach(self._url, self._copy, leads=self._coordinator.is_leader)
        return self._store is not None

    def _fetch(self, mine: list[tuple[str, dict[str, Any]]]) -> Fault | None:
        store, copy, retries = self._store, self._copy, self._retries
        if store is None:
            return None
        try:
            jobs = [partial(_fetch, store, copy.step, self._temporary, name, entry, retries) for name, entry in mine]
            in_threads(jobs, THREADS)
            for name in RUN_FILES if self._coordinator.is_leader else ():
                if _fetch_run_file(store, copy, self._beside, name, retries):
                    self._run_files.append(name)
        except BaseException as error:  # the other ranks wait for this rank's report
            return _fault(error)
        return None

    def _end(self, faults: list[Fault | None]) -> Fault | None:
        try:
            worst = min((fault for fault in faults if fault is not None), default=None)
            return worst or _publish(self._copy, self._run_dir, self._temporary, self._beside, self._run_files)
        finally:
            remove_dir(self._temporary, ignore_errors=True)
            remove_dir(self._beside, ignore_errors=True)


def _reach(url: str, copy: Copy, *, leads: bool) -> RemoteStore | None:
    """Return the remote if this rank can read `copy`, else None: its machine may lack the credentials or the route."""
    if leads:  # the leader found the copy
        return RemoteStore(url)
    retries = Retries(url, stalled_s=CHECK_S, give_up_s=CHECK_S)
    try:
        store = retries.call("opening", partial(RemoteStore, url), final=(Exception,))
        found = retries.call("reading a manifest", partial(store.read, object_name(copy.step, MANIFEST)))
    except Exception as error:
        log.warning("This rank cannot read %s (%s); other ranks download the files.", url, one_line(error))
        return None
    return store if found is not None and hash_of(found) == copy.manifest_hash else None


def unreadable_message(url: str, text: str) -> str:
    return (
        f"checkpoint.remote={url} cannot be read, but may have checkpoints of this run ({text}). "
        "Restore access to it and start again."
    )


def _disk_error_message(url: str, text: str) -> str:
    return f"A checkpoint from {url} cannot be written to the disk: {text}. Fix the disk error and start again."


def _fault(error: BaseException) -> Fault:
    if isinstance(error, LocalFault):
        return DISK, str(error)
    if isinstance(error, DamagedCheckpoint):
        return DAMAGE, str(error)
    return (STOPPED if isinstance(error, Stopped) else NETWORK), one_line(error)


def _fetch(store: RemoteStore, step: int, root: Path, name: str, entry: dict[str, Any], retries: Retries) -> None:
    def chunks() -> Iterator[bytes]:
        try:
            for chunk in store.chunks(object_name(step, name)):
                retries.beat()
                yield chunk
        except FileNotFoundError:
            raise DamagedCheckpoint(f"{store.url}: {name} of step {step} is missing") from None
        except OSError as error:  # not a disk error
            raise ConnectionError(f"{type(error).__name__}: {error}") from error

    def attempt() -> None:
        try:
            remove_file(root / name, missing_ok=True)
            written = write_file(root, name, chunks())
        except ConnectionError:
            raise
        except OSError as error:
            raise LocalFault(str(error)) from error
        if (written.size, written.xxh3_128) != (entry["size"], entry["xxh3_128"]):
            raise DamagedCheckpoint(f"{store.url}: {name} of step {step} differs from its hash")

    retries.call(f"fetching {name} of step {step}", attempt, final=(DamagedCheckpoint, LocalFault))


def _fetch_run_file(store: RemoteStore, copy: Copy, root: Path, name: str, retries: Retries) -> bool:
    """Fetch a run file that was copied with `copy`; log a warning and return False when it differs from its hash."""
    try:
        if name not in copy.run_files:
            raise DamagedCheckpoint("remote.json does not list it")
        _fetch(store, copy.step, root, RUN_FILES[name], copy.run_files[name], retries)
    except DamagedCheckpoint:
        log.warning("%s: %s of step %d is damaged or missing and is skipped.", store.url, name, copy.step)
        return False
    return True


def _publish(copy: Copy, run_dir: Path, temporary: Path, beside: Path, fetched: list[str]) -> Fault | None:
    try:
        # Rename these before the checkpoint: after a kill in between, the next start finds no checkpoint and downloads
        # again.
        for name in fetched:
            if name != RUN_FILE or not (run_dir / RUN_FILE).exists():
                rename_durably(beside / RUN_FILES[name], run_dir / name)
        publish(run_dir, temporary, copy.step, copy.manifest, Coordinator(Transport()))
    except (OSError, SaveFailed) as error:
        return DISK, str(error.__cause__ or error)
    return None
