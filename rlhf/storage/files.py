"""Bytes to disk and back: every file is hashed from memory while it is written, flushed and fsynced before anyone counts on it."""

import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import xxhash

from rlhf.events import announce
from rlhf.storage.layout import TEMPORARY

CHUNK = 8 << 20
BLOCK = 4 << 20
"""Bytes that have a hash of their own, so that a part of a file can be checked without reading the rest."""


@dataclass(frozen=True)
class WrittenFile:
    """One file of a checkpoint: path relative to it, size in bytes, and the xxh3-128 of each block of 4 MiB in hex, one after the other.

    A file of one block thus has the hash that `xxhsum -H2` prints.
    """

    path: str
    size: int
    xxh3_128: str


class BlockHashes:
    """The hashes of a stream's blocks."""

    def __init__(self) -> None:
        self.size = 0
        self._done: list[str] = []
        self._digest = xxhash.xxh3_128()

    def update(self, view: memoryview) -> None:
        """The next bytes, any number of them."""
        while view:
            part = view[: BLOCK - self.size % BLOCK]
            self._digest.update(part)
            self.size += len(part)
            view = view[len(part) :]
            if self.size % BLOCK == 0:
                self._done.append(self._digest.hexdigest())
                self._digest.reset()

    def hexdigests(self) -> str:
        """One hash per started block, one after the other; empty for no bytes."""
        return "".join(self._done) + (self._digest.hexdigest() if self.size % BLOCK else "")


def write_file(root: Path, path: str, chunks: Iterable[bytes | memoryview]) -> WrittenFile:
    """Write `chunks` to the new file `root/path`, fsync it, and return its hashes, computed from the memory that was written.

    Raises FileExistsError when the file is there already: nothing is ever overwritten in place.
    """
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    hashes = BlockHashes()
    try:
        with target.open("xb", buffering=0) as file, ThreadPoolExecutor(1) as beside:
            for number, chunk in enumerate(chunks):
                view = memoryview(chunk).cast("B")
                # In memory, writing takes three times as long as hashing: where a core is free, the hash takes no time.
                hashing = beside.submit(hashes.update, view) if len(view) >= BLOCK else None
                if hashing is None:
                    hashes.update(view)
                while view:
                    view = view[file.write(view) :]
                if hashing is not None:
                    hashing.result()
                if number == 0:  # of a safetensors file the header without its tensors: half written
                    announce("commit.file_write")
            announce("commit.fsync")
            os.fsync(file.fileno())
    except OSError as error:
        # What write and fsync raise names no file, and with it the rank that failed.
        error.filename = error.filename or str(target)
        raise
    return WrittenFile(path, hashes.size, hashes.hexdigests())


def write_json(root: Path, path: str, document: object) -> WrittenFile:
    """Write `document` as JSON; floats keep every bit (Python writes the shortest text that reads back equal)."""
    return write_file(root, path, [(json.dumps(document, indent=1, sort_keys=True) + "\n").encode()])


def hash_file(path: Path) -> tuple[int, str]:
    """Size and hashes of a file on disk, as in `WrittenFile`."""
    hashes = BlockHashes()
    buffer = memoryview(bytearray(CHUNK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            hashes.update(buffer[:count])
    return hashes.size, hashes.hexdigests()


def fsync_dir(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_durably(path: Path, content: str | bytes) -> None:
    """Give the small file `path` new content such that a reader sees the old or the new one, whole, whatever happens."""
    fresh = path.with_name(f"{TEMPORARY}{path.name}")
    with fresh.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    fsync_dir(path.parent)
