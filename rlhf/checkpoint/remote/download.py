"""Downloads a remote checkpoint into a run directory; each rank that shares the directory downloads a part."""

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from xxhash import xxh3_128_hexdigest

from rlhf.checkpoint.commit.publication import begin, publish
from rlhf.checkpoint.remote.remote_store import RUN_FILES, THREADS, Copy, LocalFault, RemoteStore, object_name
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
"""A rank that gets no answer for this many seconds counts as unable to read the remote."""
DOWNLOAD_S = 600.0
"""Seconds without progress after which a rank gives up retrying a file."""
DISK, NETWORK, DAMAGE, STOPPED = range(4)
"""Reasons why a rank did not download its part. The lowest number among the ranks decides for all ranks."""
Fault = tuple[int, str]


def download(url: str, copy: Copy, run_dir: Path, coordinator: Coordinator) -> bool:
    """Download the checkpoint `copy`, run.json and the metric history; verify all files and publish it in `run_dir`.
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
    """Downloads one copy into a run directory. The ranks that can read the remote divide the files."""

    def __init__(self, url: str, copy: Copy, run_dir: Path, coordinator: Coordinator) -> None:
        self._url, self._copy, self._run_dir, self._coordinator = url, copy, run_dir, coordinator
        self._retries = Retries(url, stalled_s=DOWNLOAD_S, give_up_s=DOWNLOAD_S)
        self._store: RemoteStore | None = None
        self._run_files: list[str] = []

    def run(self) -> Fault | None:
        """Download, verify and publish; return the fault that decides for all ranks. Collective."""
        self._temporary, self._run_temporary = self._coordinator.on_leader(self._make)
        able = [rank for rank, reaches in enumerate(self._coordinator.everywhere(self._open)) if reaches]
        files = sorted(self._copy.manifest.files.items(), key=lambda item: (-item[1]["size"], item[0]))
        part = files[able.index(self._coordinator.rank) :: len(able)] if self._store is not None else []
        own = with_keep_alive(
            partial(self._fetch_part, part), lambda fault: fault is not None, self._retries.stop, self._coordinator
        )
        return self._coordinator.combine(lambda: own, self._end)

    def _make(self) -> tuple[Path, Path]:
        log.info("Fetching step %d from %s.", self._copy.step, self._url)
        try:
            make_dir(self._run_dir)
            return begin(self._run_dir, self._copy.step), self._run_dir / fresh_name(TEMPORARY, "run")
        except OSError as error:
            raise UserError(_disk_error_message(self._url, str(error))) from error

    def _open(self) -> bool:
        """Open the remote, and return whether this rank can read the copy: its machine may lack the credentials."""
        if self._coordinator.is_leader:  # the leader has read the manifest already
            self._store = RemoteStore(self._url)
            return True
        retries = Retries(self._url, stalled_s=CHECK_S, give_up_s=CHECK_S)
        try:
            store = retries.call("opening", partial(RemoteStore, self._url), final=(Exception,))
            name = object_name(self._copy.step, MANIFEST)
            manifest = retries.call("reading a manifest", partial(store.read, name))
        except Exception as error:
            log.warning("This rank cannot read %s (%s); other ranks download the files.", self._url, one_line(error))
            return False
        if manifest is not None and xxh3_128_hexdigest(manifest) == self._copy.manifest_hash:
            self._store = store
        return self._store is not None

    def _fetch_part(self, part: list[tuple[str, dict[str, Any]]]) -> Fault | None:
        if (store := self._store) is None:
            return None
        try:
            in_threads([partial(self._fetch, store, self._temporary, name, entry) for name, entry in part], THREADS)
            for name in RUN_FILES if self._coordinator.is_leader else ():
                self._fetch_run_file(store, name)
        except BaseException as error:  # return the error: the other ranks wait for this rank's report
            return _fault(error)
        return None

    def _fetch(self, store: RemoteStore, root: Path, name: str, entry: dict[str, Any]) -> None:
        step = self._copy.step

        def chunks() -> Iterator[bytes]:
            try:
                for chunk in store.chunks(object_name(step, name)):
                    self._retries.beat()
                    yield chunk
            except FileNotFoundError:
                raise DamagedCheckpoint(f"{self._url}: {name} of step {step} is missing") from None
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
                raise DamagedCheckpoint(f"{self._url}: {name} of step {step} differs from its hash")

        self._retries.call(f"fetching {name} of step {step}", attempt, final=(DamagedCheckpoint, LocalFault))

    def _fetch_run_file(self, store: RemoteStore, name: str) -> None:
        """Download a run file that was copied with the checkpoint; log a warning if it is missing or damaged."""
        try:
            if name not in self._copy.run_files:
                raise DamagedCheckpoint("remote.json does not list it")
            self._fetch(store, self._run_temporary, RUN_FILES[name], self._copy.run_files[name])
            self._run_files.append(name)
        except DamagedCheckpoint:
            log.warning("%s: %s of step %d is damaged or missing and is skipped.", self._url, name, self._copy.step)

    def _end(self, faults: list[Fault | None]) -> Fault | None:
        try:
            worst = min((fault for fault in faults if fault is not None), default=None)
            return worst or self._publish()
        finally:
            remove_dir(self._temporary, ignore_errors=True)
            remove_dir(self._run_temporary, ignore_errors=True)

    def _publish(self) -> Fault | None:
        try:
            # Rename the run files before the checkpoint. After a kill in between, the next start finds no checkpoint
            # and downloads again.
            for name in self._run_files:
                if name != RUN_FILE or not (self._run_dir / RUN_FILE).exists():
                    rename_durably(self._run_temporary / RUN_FILES[name], self._run_dir / name)
            copy = self._copy
            publish(self._run_dir, self._temporary, copy.step, copy.manifest, Coordinator(Transport()))
        except (OSError, SaveFailed) as error:
            return DISK, str(error.__cause__ or error)
        return None


def unreadable_message(url: str, text: str) -> str:
    return (
        f"checkpoint.remote={url} cannot be read, but may have checkpoints of this run ({text}). "
        "Restore access to the remote and start again."
    )


def _disk_error_message(url: str, text: str) -> str:
    return f"A checkpoint from {url} cannot be written to the disk: {text}. Fix the disk error and start again."


def _fault(error: BaseException) -> Fault:
    if isinstance(error, LocalFault):
        return DISK, str(error)
    if isinstance(error, DamagedCheckpoint):
        return DAMAGE, str(error)
    return (STOPPED if isinstance(error, Stopped) else NETWORK), one_line(error)
