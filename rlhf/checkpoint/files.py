"""Bytes to disk and back: every file is hashed from memory while it is written, flushed and fsynced before anyone counts on it."""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from rlhf.checkpoint.layout import TEMPORARY
from rlhf.events import announce

CHUNK = 8 << 20


@dataclass(frozen=True)
class WrittenFile:
    """One file of a checkpoint: path relative to it, size in bytes, xxh3-128 of the content in hex."""

    path: str
    size: int
    xxh3_128: str


def write_file(root: Path, path: str, chunks: Iterable[bytes | memoryview]) -> WrittenFile:
    """Write `chunks` to the new file `root/path`, fsync it, and return its hash, computed from the memory that was written.

    Raises FileExistsError when the file is there already: nothing is ever overwritten in place.
    """
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    digest, size = xxhash.xxh3_128(), 0
    try:
        with target.open("xb", buffering=0) as file:
            for number, chunk in enumerate(chunks):
                view = memoryview(chunk).cast("B")
                digest.update(view)
                size += len(view)
                while view:
                    view = view[file.write(view) :]
                if number == 0:  # of a safetensors file the header without its tensors: half written
                    announce("commit.file_write")
            announce("commit.fsync")
            os.fsync(file.fileno())
    except OSError as error:
        # What write and fsync raise names no file, and with it the rank that failed.
        error.filename = error.filename or str(target)
        raise
    return WrittenFile(path, size, digest.hexdigest())


def write_json(root: Path, path: str, document: object) -> WrittenFile:
    """Write `document` as JSON; floats keep every bit (Python writes the shortest text that reads back equal)."""
    return write_file(root, path, [(json.dumps(document, indent=1, sort_keys=True) + "\n").encode()])


def hash_file(path: Path) -> tuple[int, str]:
    """Size and xxh3-128 of a file on disk, read in pieces of 8 MiB."""
    digest, size = xxhash.xxh3_128(), 0
    buffer = memoryview(bytearray(CHUNK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
    return size, digest.hexdigest()


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
