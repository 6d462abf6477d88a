"""Remote folder of a run's checkpoints, through fsspec: object stores, HDFS, or a folder.

It has neither rename nor fsync; the manifest commits.

```
<checkpoint.remote>/<project>/<experiment>/
  run.json                    the run whose checkpoints count
  lease.json                  the machine that copies there
  global_step_N/
    ...                       the files of the local checkpoint
    run/{run.json,metrics.jsonl}   the run's id, and its history up to step N
    remote.json               whose copy it is; size and hash of the two and of the manifest
    manifest.json             the local one, byte for byte; written last, removed first
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

import xxhash
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem

from rlhf.checkpoint.commit.manifest import Manifest, parse_manifest
from rlhf.config.schema.checkpoint import CheckpointConfig
from rlhf.config.schema.trainer import TrainerConfig
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.hashing import BlockHashes
from rlhf.storage.layout import HISTORY, MANIFEST, RUN_FILE, step_dir, step_of

log = logging.getLogger(__name__)
CHUNK = 8 << 20
THREADS = 4
"""Files that are sent or fetched at a time."""
COPY = "remote.json"
RUN_FILES = {RUN_FILE: f"run/{RUN_FILE}", HISTORY: f"run/{HISTORY}"}
"""Files of the run directory that go along with every copy, and their names there."""


class LocalFault(Exception):
    """A fault on this side of the network (a damaged or missing file, a full disk): trying the remote again would not
    help."""


@dataclass(frozen=True)
class Copy:
    """A complete checkpoint in the remote folder: its manifest, that one's hash, and what remote.json says of the
    run."""

    step: int
    manifest: Manifest
    manifest_hash: str
    run_id: str | None
    run_files: dict[str, dict[str, Any]]


class RemoteStore:
    """One run's remote folder.

    Every method is one or a few calls over the network and raises what they raise; none is retried here.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        # Only folders need their parents made; elsewhere making one could mean to create a bucket with a mistyped name.
        options = {"auto_mkdir": True} if self.url.startswith("file://") else {}
        self._fs, self._root = url_to_fs(self.url, use_listings_cache=False, **options)

    def check(self) -> None:
        """Write a small object, look at it and remove it."""
        name = f".probe-{uuid.uuid4().hex[:12]}"
        self.write(name, [b"May be deleted.\n"])
        self._fs.rm_file(self._path(name))

    def write(self, name: str, chunks: Iterable[bytes]) -> None:
        """Write an object and look whether it has arrived in its full length."""
        path, size = self._path(name), 0
        with self._fs.open(path, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
                size += len(chunk)
        arrived = self._fs.info(path)["size"]
        if arrived != size:
            raise OSError(f"{name} has {arrived} bytes there instead of {size}")

    def create(self, name: str, content: bytes) -> bool:
        """Write a small object that is not there, by a call that no other machine's can come between.

        False, and nothing written, where there is one by now, or the store has no such call.
        """
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
            return False  # it looks, and then writes
        try:
            self._fs.pipe_file(path, content, mode="create")
        except (OSError, NotImplementedError) as error:
            log.debug("%s was not created: %s", name, error)
            return False
        return True

    def remove_object(self, name: str) -> None:
        """Remove a small object if it is there."""
        with suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))

    def read(self, name: str) -> bytes | None:
        """The bytes of a small object, or None when there is none."""
        try:
            return self._fs.cat_file(self._path(name))
        except FileNotFoundError:
            return None

    def chunks(self, name: str) -> Iterator[bytes]:
        """An object's bytes in chunks; raises FileNotFoundError when there is none."""
        with self._fs.open(self._path(name), "rb") as file:
            while chunk := file.read(CHUNK):
                yield chunk

    def part(self, name: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of an object, fewer where it ends before; raises FileNotFoundError when there is none."""
        return self._fs.cat_file(self._path(name), start=start, end=stop)

    def size(self, name: str) -> int:
        """Bytes of an object; raises FileNotFoundError when there is none."""
        return self._fs.info(self._path(name))["size"]

    def steps(self) -> list[int]:
        """Steps of which there is anything, newest first."""
        names = (entry["name"] for entry in self._entries())
        return sorted({step for name in names if (step := step_of(Path(name.rstrip("/")))) is not None}, reverse=True)

    def folders(self) -> list[str]:
        """Names of the folders here, but for links."""
        entries = (entry for entry in self._entries() if entry["type"] == "directory" and not entry.get("islink"))
        return sorted(Path(entry["name"].rstrip("/")).name for entry in entries)

    def _entries(self) -> list[dict[str, Any]]:
        # Not find() or exists(): where a network fails, they answer that there is nothing.
        try:
            return self._fs.ls(self._root, detail=True)
        except FileNotFoundError:
            return []

    def copy(self, step: int) -> Copy | None:
        """The complete checkpoint of `step`, or None for one without a valid manifest."""
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
        return Copy(step, manifest, hash_of(raw), run_id, files)

    def is_partial(self, step: int) -> bool:
        """Return whether a killed copy or removal left `step`: its manifest is missing or shorter than in remote.json.

        A manifest that is invalid for another reason (another version's format, a damaged byte) does not count: the
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
        """Remove all of `step`, its manifest first, so that it looks complete at no moment."""
        with suppress(FileNotFoundError):
            self._fs.rm_file(self._path(object_name(step, MANIFEST)))
        with suppress(FileNotFoundError):
            self._fs.rm(self._path(step_dir(Path(), step).name), recursive=True)

    def run(self) -> dict[str, Any]:
        """The run whose checkpoints count (see `run.json` of a run directory); empty when the folder is nobody's."""
        raw = self.read(RUN_FILE)
        try:
            found = json.loads(raw or b"{}")
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


def remote_url(trainer: TrainerConfig, settings: CheckpointConfig) -> str:
    """The URL of a run's remote folder, in `checkpoint.remote` as the run directory in `trainer.default_local_dir`."""
    return f"{(settings.remote or '').rstrip('/')}/{trainer.project_name}/{trainer.experiment_name}"


def object_name(step: int, name: str) -> str:
    """The name of a file of the checkpoint of `step`, relative to the run's remote folder."""
    return f"{step_dir(Path(), step).name}/{name}"


def hash_of(content: bytes) -> str:
    """xxh3-128 in hex."""
    return xxhash.xxh3_128(content).hexdigest()


def described_bytes(chunks: Iterable[bytes]) -> dict[str, Any]:
    """Size and hashes of the bytes, as a manifest has them."""
    hashes = BlockHashes()
    for chunk in chunks:
        hashes.update(memoryview(chunk))
    return {"size": hashes.size, "xxh3_128": hashes.hexdigests()}
