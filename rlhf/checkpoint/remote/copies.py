"""Copies published checkpoints to the remote folder during the training; retries, logs and counts failures."""

import json
import logging
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from xxhash import xxh3_128_hexdigest

from rlhf.checkpoint.commit.manifest import Manifest, damage_in, manifest_bytes, parse_manifest
from rlhf.checkpoint.remote.lease import Lease
from rlhf.checkpoint.remote.remote_start import claim
from rlhf.checkpoint.remote.remote_store import (
    CHUNK,
    COPY,
    RUN_FILES,
    THREADS,
    LocalFault,
    RemoteStore,
    described_bytes,
    object_name,
    remote_url,
)
from rlhf.checkpoint.remote.retries import Retries, Stopped, in_threads
from rlhf.checkpoint.remote.upload_links import checkpoint_of, link_for_upload, remove_links, remove_upload_links
from rlhf.checkpoint.state.run_file import read_run_file
from rlhf.config.schema.checkpoint import CheckpointConfig
from rlhf.config.schema.trainer import TrainerConfig
from rlhf.errors import Unsaved, UserError
from rlhf.events import announce
from rlhf.ranks.next_start import changes_to_continue
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.files import remove_dir
from rlhf.storage.hashing import BlockHashes
from rlhf.storage.history_file import DamagedHistory, HistoryMark, end_of_step
from rlhf.storage.layout import DRIVER_STATE, HISTORY, MANIFEST, RUN_FILE, scan, step_dir, step_of
from rlhf.storage.reading import CheckedFiles

log = logging.getLogger(__name__)
STALLED_S = 300.0


class RemoteCopies:
    """Copies a run's checkpoints to its remote folder, newest first, in a thread of the leader, and logs failures.

    Every checkpoint in the run directory without a complete remote copy is pending, also a checkpoint of an earlier
    process. So a restart needs no record of pending copies.
    """

    def __init__(self, run_dir: Path, trainer: TrainerConfig, settings: CheckpointConfig) -> None:
        self._run_dir, self._trainer, self._settings = run_dir, trainer, settings
        self._keep = settings.remote_max_to_keep
        self._retries = Retries(f"checkpoint.remote={settings.remote}", stalled_s=STALLED_S)
        self._changed = threading.Condition()
        self._pending: set[int] = set()
        self._busy = True  # until the thread has listed the remote folder
        self._started = self._over = False
        self._links: Path | None = None
        self._complete: dict[int, str] = {}  # step -> hash of the manifest, for complete copies of this run
        self._bytes, self._seconds = 0, 0.0
        self._lease: Lease | None = None

    def start(self) -> None:
        """Start the thread that copies. Checkpoints of earlier starts are pending at once. Later calls do nothing."""
        if self._started:
            return
        self._started = True
        remove_upload_links(self._run_dir)
        self._pending.update(step for path in scan(self._run_dir) if (step := step_of(path)) is not None)
        threading.Thread(target=self._work, name="remote-copies", daemon=True).start()

    def published(self, path: Path) -> None:
        with self._changed:
            self._pending.add(step_of(path) or 0)
            self._changed.notify_all()

    def metrics(self) -> dict[str, float]:
        """Return pending checkpoints, failed network calls so far, and bytes and seconds of the copies completed since
        the last `metrics()`."""
        with self._changed:
            found: dict[str, float] = {
                "perf/remote_pending": len(self._pending),
                "perf/remote_failures": self._retries.failures,
            }
            if self._bytes:
                found |= {"perf/remote_bytes": self._bytes, "perf/remote_seconds": self._seconds}
            self._bytes, self._seconds = 0, 0.0
            return found

    def cancel_copy(self) -> None:
        """Stop the copy in progress if its checkpoint was removed and only the copy's links still use disk space.

        A save that lacks disk space calls this.
        """
        with self._changed:
            if (links := self._links) is not None and not (removed := checkpoint_of(links)).exists():
                log.warning("%s is not copied to checkpoint.remote: a save needs its disk space.", removed.name)
                self._links = None
                remove_dir(links, ignore_errors=True)

    def finish(self, deadline_s: float) -> list[int]:
        """Wait at most `deadline_s` seconds for pending copies, then stop; return the uncopied steps, newest first."""
        self._retries.hurry()
        end = time.monotonic() + deadline_s
        with self._changed:
            while self._started and not self._over and (self._pending or self._busy) and time.monotonic() < end:
                announce("commit.remote")  # shows that this rank waits and does not hang
                self._changed.wait(min(1.0, max(0.0, end - time.monotonic())))
            left = sorted(self._pending, reverse=True)
        self._retries.stop()
        with self._changed:
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._over or not self._started, 1.0)
        if left:
            names = ", ".join(step_dir(Path(), step).name for step in left)
            log.warning(
                "Not copied to checkpoint.remote=%s: %s. The next start copies the rest.", self._settings.remote, names
            )
        return left

    def _work(self) -> None:
        try:
            store = self._retries.call("opening", partial(RemoteStore, remote_url(self._trainer, self._settings)))
            self._lease = Lease(store, self._run_dir, self._retries)
            self._lease.acquire()
            claim(store, self._run_dir, self._trainer, self._retries)
            self._list_copies(store)
            while True:
                self._copy_next(store)
        except Stopped:
            pass
        except UserError as error:
            log.error("%s The run copies no more checkpoints there; training goes on.", error)
        except Exception:
            log.exception("The run copies no more checkpoints to checkpoint.remote; training goes on.")
        finally:
            if self._lease is not None:
                self._lease.release()
            with self._changed:
                self._over = True
                self._changed.notify_all()

    def _own_lease(self) -> Lease:
        assert self._lease is not None
        return self._lease

    def _list_copies(self, store: RemoteStore) -> None:
        """List the complete copies, and remove copies that earlier starts left half copied or half removed."""
        run_id, others = read_run_file(self._run_dir)["run_id"], 0
        for step in self._retries.call("listing", store.steps):
            copy = self._retries.call(f"reading step {step}", partial(store.copy, step))
            if copy is not None and copy.run_id == run_id:
                self._complete[step] = copy.manifest_hash
            elif copy is not None or not self._retries.call(f"reading step {step}", partial(store.is_partial, step)):
                others += 1
            else:
                log.info("Removing the interrupted copy of step %d from %s.", step, store.url)
                self._retries.call(f"removing step {step}", partial(store.remove, step))
        if others:
            log.warning(
                "%s holds %d checkpoints of other runs or versions. The run ignores them, but replaces a checkpoint of "
                "the same step.",
                store.url,
                others,
            )
        with self._changed:
            self._busy = False
            self._changed.notify_all()

    def _copy_next(self, store: RemoteStore) -> None:
        with self._changed:
            while not self._pending:
                self._retries.beat()
                self._changed.wait()
            self._retries.beat()
            self._busy, step = True, max(self._pending)
        try:
            self._own_lease().confirm()
            self._copy(store, step)
            with self._changed:
                self._pending.discard(step)
            self._retain(store)
        except (LocalFault, DamagedCheckpoint) as error:
            log.error("The checkpoint of step %d is not copied to checkpoint.remote: %s", step, error)
            with self._changed:
                self._pending.discard(step)
        finally:
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _copy(self, store: RemoteStore, step: int) -> None:
        path = step_dir(self._run_dir, step)
        if self._keep is not None and sum(other > step for other in self._complete) >= self._keep:
            return
        try:
            if self._complete.get(step) == xxh3_128_hexdigest(manifest_bytes(path)):
                return
            source = self._linked(path)
        except (DamagedCheckpoint, LocalFault):
            if path.exists():
                raise
            log.info("%s was removed before the run could copy it to checkpoint.remote.", path.name)
            return
        try:
            self._upload(store, step, source)
        except OSError as error:  # a local error: network calls are retried until they succeed
            raise LocalFault(str(error)) from error
        finally:
            with self._changed:
                self._links = None
            if source != path:
                remove_links(source)

    def _linked(self, path: Path) -> Path:
        """Return a folder of hard links to the files of `path`, so that retention cannot remove them before the copy.
        Return `path` itself if links are not possible. Raise LocalFault if a file is missing, and
        DamagedCheckpoint for a manifest that is missing or damaged."""
        try:
            links = link_for_upload(path)
        except FileNotFoundError as error:
            raise LocalFault(f"{error.filename} is missing") from error
        except OSError as error:
            log.warning("%s cannot be linked and is copied without links: %s", path.name, error)
            return path
        with self._changed:
            self._links = links
        return links

    def _upload(self, store: RemoteStore, step: int, source: Path) -> None:
        """Copy `source`. After a LocalFault or DamagedCheckpoint, the remote copy is unchanged or removed."""
        started, call = time.monotonic(), self._retries.call
        sealed = manifest_bytes(source)
        manifest = parse_manifest(sealed, source / MANIFEST)
        files, partly = CheckedFiles(source, manifest.files), partial(store.is_partial, step)
        if not call(f"reading step {step}", partly) and (problems := damage_in(files, manifest.files)):
            # Keep the remote copy, which may be damaged or of another trajectory, because the local files are damaged.
            raise DamagedCheckpoint(f"{'; '.join(problems)}; the existing copy is unchanged")
        run_files = _describe_run_files(self._run_dir, source, step)
        # Remove an old copy before the first file is sent, because the old copy may have other files.
        self._complete.pop(step, None)
        call(f"removing step {step}", partial(store.remove, step))
        try:
            self._send_all(store, manifest, sealed, source, run_files)
        except (LocalFault, OSError):
            call(f"removing step {step}", partial(store.remove, step))
            raise
        self._complete[step] = xxh3_128_hexdigest(sealed)
        size = sum(entry["size"] for entry in [*manifest.files.values(), *run_files.values()])
        seconds = time.monotonic() - started
        with self._changed:
            self._bytes, self._seconds = self._bytes + size, self._seconds + seconds
        log.info("Copied step %d to %s: %.1f MiB in %.1f s.", step, store.url, size / 2**20, seconds)

    def _send_all(
        self, store: RemoteStore, manifest: Manifest, sealed: bytes, source: Path, run_files: dict[str, dict[str, Any]]
    ) -> None:
        step, call = manifest.step, self._retries.call
        described = run_files | {MANIFEST: described_bytes([sealed])}
        about = {"run_id": read_run_file(self._run_dir)["run_id"], "step": step, "files": described}
        largest_first = sorted(manifest.files, key=lambda name: -manifest.files[name]["size"])
        in_threads(
            [partial(self._send, store, step, source / name, name, manifest.files[name]) for name in largest_first],
            THREADS,
        )
        for name, entry in run_files.items():
            self._send(store, step, self._run_dir / name, RUN_FILES[name], entry)
        # Write the manifest last, because it completes the copy.
        for name, content in [(COPY, json.dumps(about, indent=1).encode()), (MANIFEST, sealed)]:
            call(f"writing {name} of step {step}", partial(store.write, object_name(step, name), [content]))

    def _send(self, store: RemoteStore, step: int, path: Path, name: str, entry: dict[str, Any]) -> None:
        """Send the bytes of `path` that `entry` describes, as `name`."""

        def attempt() -> None:
            hashes = BlockHashes()

            def chunks() -> Iterator[bytes]:
                for chunk in _chunks_of(path, entry["size"] if name in RUN_FILES.values() else None):
                    self._own_lease().check()
                    hashes.update(memoryview(chunk))
                    self._retries.beat()
                    yield chunk

            store.write(object_name(step, name), chunks())
            if (hashes.size, hashes.hexdigests()) != (entry["size"], entry["xxh3_128"]):
                raise LocalFault(f"{name} differs from its hash")

        self._retries.call(f"writing {name} of step {step}", attempt, final=(LocalFault, UserError))

    def _retain(self, store: RemoteStore) -> None:
        self._own_lease().check()
        for step in sorted(self._complete, reverse=True)[self._keep :] if self._keep is not None else []:
            self._retries.call(f"removing step {step}", partial(store.remove, step))
            del self._complete[step]


def copy_pending(run_dir: Path, trainer: TrainerConfig, settings: CheckpointConfig) -> list[int]:
    """Copy a finished run's pending checkpoints within `checkpoint.timeout_s`; return the steps still incomplete."""
    if settings.remote is None:
        return []
    copies = RemoteCopies(run_dir, trainer, settings)
    copies.start()
    return copies.finish(settings.timeout_s)


def check_copied(left: list[int], run_dir: Path, trainer: TrainerConfig, settings: CheckpointConfig) -> None:
    if left:
        names = ", ".join(step_dir(Path(), step).name for step in left)
        raise Unsaved(
            f"The training is finished and saved in {run_dir}, but checkpoint.remote={settings.remote} lacks {names}. "
            f"Run the same command{changes_to_continue(trainer)} again to copy the rest."
        )


def _chunks_of(path: Path, size: int | None = None) -> Iterator[bytes]:
    """Yield a file's bytes, or only the first `size` bytes. With `size` 0, the file need not exist."""
    if size == 0:
        return
    try:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK if size is None else min(CHUNK, size)):
                size = None if size is None else size - len(chunk)
                yield chunk
    except OSError as error:
        raise LocalFault(f"{path.name} cannot be read: {error.strerror}") from error


def _describe_run_files(run_dir: Path, source: Path, step: int) -> dict[str, dict[str, Any]]:
    """Return size and hashes of the run files that belong to `source`: run.json, and the metric history up to `step`.
    The records up to `step` were synced before the checkpoint was published, and never change."""
    state, history = source / DRIVER_STATE, run_dir / HISTORY
    try:
        saved = json.loads(state.read_bytes()).get("history") if state.exists() else None
        end = end_of_step(history, step, HistoryMark(**saved["mark"]) if saved else None)
    except (ValueError, DamagedHistory) as error:
        raise LocalFault(str(error)) from error
    parts = {RUN_FILE: _chunks_of(run_dir / RUN_FILE), HISTORY: _chunks_of(history, end)}
    return {name: described_bytes(chunks) for name, chunks in parts.items()}
