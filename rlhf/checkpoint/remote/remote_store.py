"""Reads and writes a run's remote folder through fsspec: object stores, HDFS, or a folder.

A remote has neither rename nor fsync; the manifest, written last, commits a copy.

```
<checkpoint.remote>/<project>/<experiment>/
  run.json                    the id of the run that owns the folder
  lease.json                  the machine that may write to the folder
  global_step_N/
    ...                       the files of the local checkpoint
    run/{run.json,metrics.jsonl}   the run's id, and its history up to step N
    remote.json               the run's id; size and hash of run/* and of the manifest
    manifest.json             a copy of the local manifest; written last, removed first
```
"""

import json
import logging
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem
from xxhash import xxh3_128_hexdigest

from rlhf.checkpoint.commit.manifest import Manifest, parse_manifest
from rlhf.config.schema.checkpoint import CheckpointConfig
from rlhf.config.schema.trainer import TrainerConfig
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.hashing import BlockHashes
from rlhf.storage.layout import HISTORY, MANIFEST, RUN_FILE, step_dir, step_of

log = logging.getLogger(__name__)
CHUNK = 8 << 20
THREADS = 4
"""Number of files that are sent or received at the same time."""
COPY = "remote.json"
RUN_FILES = {RUN_FILE: f"run/{RUN_FILE}", HISTORY: f"run/{HISTORY}"}
"""Files of the run directory that every copy includes -> their names in the copy."""


class LocalFault(Exception):
    """A damaged or missing local file, or a full disk: a retry of the remote call cannot fix it."""


@dataclass(frozen=True)
class Copy:
    """A complete checkpoint in the remote folder: manifest, its hash, and the run's entries in remote.json."""

    step: int
    manifest: Manifest
    manifest_hash: str
    run_id: str | None
    run_files: dict[str, dict[str, Any]]


class RemoteStore:
    """Reads and writes one run's remote folder with a few network calls per method, without retries."""

    def __init__(self, url: str) -> None:
        self.url = url
        # Create parents only for local folders: in an object store this could create a bucket with a mistyped name.
        options = {"auto_mkdir": True} if self.url.startswith("file://") else {}
        self._fs, self._root = url_to_fs(self.url, use_listings_cache=False, **options)

    def check(self) -> None:
        """Write a small object, check its size and remove it."""
        name = f".probe-{uuid.uuid4().hex[:12]}"
        self.write(name, [b"May be deleted.\n"])
        self._fs.rm_file(self._path(name))

    def write(self, name: str, chunks: Iterable[bytes]) -> None:
        """Write an object and check that all its bytes have arrived."""
        path, size = self._path(name), 0
        with self._fs.open(path, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
                size += len(chunk)
        arrived = self._fs.info(path)["size"]
        if arrived != size:
            raise OSError(f"{name} has {arrived} bytes in the remote folder instead of {size}")

    def create(self, name: str, content: bytes) -> bool:
        """Create a small object. If several machines try, only one succeeds. Return False if the object exists,
        the store cannot create atomically, or a network call fails."""
        path = self._path(name)
        if isinstance(self._fs, LocalFileSystem):
            self._fs.makedirs(self._root, exist_ok=True)
            try:
                with self._fs.open(path, "xb") as file:
                    file.write(content)
            except FileExistsError:
                return False
            return True
        if not self._fs.async_impl and type(self._fs).pipe_file is AbstractFileSystem.pipe_file:
            return False  # fsspec would check for the object and then write it, which is not atomic
        try:
            self._fs.pipe_file(path, content, mode="create")
        except (OSError, NotImplementedError) as error:
            log.debug("%s was not created: %s", name, error)
            return False
        return True

    def remove_object(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))

    def read(self, name: str) -> bytes | None:
        """Return the bytes of a small object, or None if it does not exist."""
        try:
            return self._fs.cat_file(self._path(name))
        except FileNotFoundError:
            return None

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yield an object's bytes in chunks; raise FileNotFoundError if it does not exist."""
        with self._fs.open(self._path(name), "rb") as file:
            while chunk := file.read(CHUNK):
                yield chunk

    def part(self, name: str, start: int, stop: int) -> bytes:
        """Return bytes [start, stop) of an object, fewer at its end; raise FileNotFoundError if it does not exist."""
        return self._fs.cat_file(self._path(name), start=start, end=stop)

    def size(self, name: str) -> int:
        """Return an object's size in bytes; raise FileNotFoundError if it does not exist."""
        return self._fs.info(self._path(name))["size"]

    def steps(self) -> list[int]:
        names = (entry["name"] for entry in self._entries())
        return sorted({step for name in names if (step := step_of(Path(name.rstrip("/")))) is not None}, reverse=True)

    def folders(self) -> list[str]:
        """Return the names of the folders in the remote folder, without links."""
        entries = (entry for entry in self._entries() if entry["type"] == "directory" and not entry.get("islink"))
        return sorted(Path(entry["name"].rstrip("/")).name for entry in entries)

    def _entries(self) -> list[dict[str, Any]]:
        # Do not use find() or exists(): after a network failure, they report that nothing exists.
        try:
            return self._fs.ls(self._root, detail=True)
        except FileNotFoundError:
            return []

    def copy(self, step: int) -> Copy | None:
        """Return the complete checkpoint of `step`, or None without a valid manifest."""
        raw = self.read(object_name(step, MANIFEST))
        if raw is None:
            return None
        try:
            manifest = parse_manifest(raw, Path(self.url, object_name(step, MANIFEST)))
        except DamagedCheckpoint:
            return None
        if manifest.step != step:
            return None
        try:
            about = json.loads(self.read(object_name(step, COPY)) or b"")
            run_id, files = about["run_id"], about["files"]
        except (ValueError, KeyError, TypeError):
            run_id, files = None, {}
        return Copy(step, manifest, xxh3_128_hexdigest(raw), run_id, files)

    def is_partial(self, step: int) -> bool:
        """Return whether a kill left `step` incomplete: its manifest is missing, or shorter than in remote.json.

        Return False for a manifest that is invalid for another reason (another version's format, a damaged byte): the
        files beside it may suffice to repair the copy.
        """
        raw = self.read(object_name(step, MANIFEST))
        try:
            return (
                raw is None
                or len(raw) < json.loads(self.read(object_name(step, COPY)) or b"")["files"][MANIFEST]["size"]
            )
        except (ValueError, KeyError, TypeError):
            return False

    def remove(self, step: int) -> None:
        """Remove all of `step`, the manifest first, so that a partial removal never looks complete."""
        self.remove_object(object_name(step, MANIFEST))
        with suppress(FileNotFoundError):
            self._fs.rm(self._path(step_dir(Path(), step).name), recursive=True)

    def run(self) -> dict[str, Any]:
        """Return the owner's run.json; empty if this file is missing or is not a JSON object."""
        raw = self.read(RUN_FILE)
        try:
            found = json.loads(raw or b"{}")
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


def remote_url(trainer: TrainerConfig, settings: CheckpointConfig) -> str:
    """Return the URL of a run's remote folder, `<checkpoint.remote>/<project>/<experiment>`."""
    return f"{(settings.remote or '').rstrip('/')}/{trainer.project_name}/{trainer.experiment_name}"


def object_name(step: int, name: str) -> str:
    """Return the name, in the run's remote folder, of a file of the checkpoint of `step`."""
    return f"{step_dir(Path(), step).name}/{name}"


def described_bytes(chunks: Iterable[bytes]) -> dict[str, Any]:
    """Return size and hashes of the bytes, as in a manifest."""
    hashes = BlockHashes()
    for chunk in chunks:
        hashes.update(memoryview(chunk))
    return {"size": hashes.size, "xxh3_128": hashes.hexdigests()}
