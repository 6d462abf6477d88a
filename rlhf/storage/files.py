"""File operations: all that writes, syncs, renames, links or removes in a run directory is one of these functions.

What a power cut must not take back is `..._durably`; everything else is for files that a crash makes worthless.
"""

import ctypes
import errno
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rlhf.events import announce
from rlhf.storage.hashing import BLOCK, BlockHashes, hash_block
from rlhf.storage.layout import TEMPORARY
from rlhf.storage.reading import fill

WRITE_BYTES = 512 << 10
"""Bytes of one write. For larger ones the kernel looks for larger pieces of free memory: a GiB in writes of 8 MiB took
1.3 s of the processor on ext4, in writes of up to 1 MiB 0.2 s."""
AT_FDCWD, RENAME_EXCHANGE = -100, 2
"""Of Linux: relative to the working directory; each gets the other's name."""
CANNOT_EXCHANGE = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP}


@dataclass(frozen=True)
class WrittenFile:
    """One file of a checkpoint: path relative to it, size in bytes, and the xxh3-128 in hex of each block, one after
    the other.

    A file of one block (4 MiB) thus has the hash that `xxhsum -H2` prints.
    """

    path: str
    size: int
    xxh3_128: str


def write_file(root: Path, path: str, chunks: Iterable[bytes | memoryview]) -> WrittenFile:
    """Write `chunks` to the new file `root/path`, fsync it, and return its hashes, computed from the memory that was
    written.

    Raises FileExistsError when the file is there already: nothing is ever overwritten in place.
    """
    target = root / path
    make_dir(target.parent)
    hashes = BlockHashes()
    with _naming(target), target.open("xb", buffering=0) as file, ThreadPoolExecutor(1) as beside:
        for number, chunk in enumerate(chunks):
            view = memoryview(chunk).cast("B")
            # In memory, writing takes three times as long as hashing: where a core is free, the hash takes no time.
            hashing = beside.submit(hashes.update, view) if len(view) >= BLOCK else None
            if hashing is None:
                hashes.update(view)
            while view:
                view = view[file.write(view[:WRITE_BYTES]) :]
            if hashing is not None:
                hashing.result()
            if number == 0:  # of a safetensors file the header without its tensors: half written
                announce("commit.file_write")
        announce("commit.fsync")
        os.fsync(file.fileno())
    return WrittenFile(path, hashes.size, hashes.hexdigests())


def described(path: str, content: bytes) -> WrittenFile:
    """Entry that `write_file` will return for these bytes."""
    hashes = BlockHashes()
    hashes.update(memoryview(content))
    return WrittenFile(path, hashes.size, hashes.hexdigests())


def write_json(root: Path, path: str, document: object) -> WrittenFile:
    """Write `document` as JSON; floats keep every bit (Python writes the shortest text that reads back equal)."""
    return write_file(root, path, [(json.dumps(document, indent=1, sort_keys=True) + "\n").encode()])


def replace_durably(path: Path, content: str | bytes) -> None:
    """Give the small file `path` new content; whatever happens, a reader sees the old or the new one, whole."""
    fresh = path.with_name(f"{TEMPORARY}{path.name}")
    with fresh.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    fsync_dir(path.parent)


def append_durably(path: Path, chunks: Iterable[bytes], event: str | None = None) -> int:
    """Add `chunks`, one after the other, to the end of a file, made if it is not there; returns their bytes.

    `event` is announced when they are written and not synced yet.
    """
    fresh = not path.exists()
    with path.open("ab") as file:
        written = sum(map(file.write, chunks))
        file.flush()
        if event is not None:
            announce(event)
        os.fsync(file.fileno())
    if fresh:
        fsync_dir(path.parent)
    return written


def open_to_append(path: Path) -> int:
    """Descriptor of a file, made if it is not there, at whose end every write is one piece whoever else writes there;
    nothing is synced."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)


def truncate(path: Path, size: int) -> None:
    """Cut a file off after `size` bytes."""
    os.truncate(path, size)


def write_small(path: Path, content: bytes) -> None:
    """Write a small file that nobody needs after a crash, such as one in a temporary folder; over what is there."""
    path.write_bytes(content)


def write_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Make `folder` a directory of just these small files, by their names, which nobody needs after a crash; what else
    lies there and cannot be removed (a file that a dying process has open over NFS) stays."""
    if folder.exists():
        remove_dir(folder, ignore_errors=True)
    make_dir(folder)
    for name, content in files.items():
        write_small(folder / name, content)


def write_private(path: Path, content: bytes) -> None:
    """Write a small file that only its owner may read; nobody ever sees a part of it under its name."""
    fresh = path.with_name(f"{TEMPORARY}{path.name}")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def write_range(path: Path, size: int, offset: int, content: memoryview) -> None:
    """Write `content` at `offset` of a file of `size` bytes, empty elsewhere and made if it is not there.

    Nothing is synced.
    """
    make_dir(path.parent)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        with _naming(path):
            os.ftruncate(descriptor, size)
            written = 0
            while written < len(content):
                written += os.pwrite(descriptor, content[written : written + WRITE_BYTES], offset + written)
    finally:
        os.close(descriptor)


class SharedFile:
    """The file `root/path`, which is written in any order, by several processes a block of it by one of them; made if
    it is not there.

    Nothing is synced but by `sync`. A block begins at a multiple of 4 MiB, so that no page has two processes writing
    it, of which a network file system may forget one.
    """

    def __init__(self, root: Path, path: str) -> None:
        self._path, self._begun = root / path, False
        make_dir(self._path.parent)
        self._beside = ThreadPoolExecutor(1)
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def write(self, number: int, content: memoryview) -> str:
        """Write all bytes of a block; returns their hash."""
        hashing = self._beside.submit(hash_block, content)
        self.write_at(number * BLOCK, content)
        return hashing.result()

    def write_at(self, position: int, content: memoryview) -> None:
        """Write bytes at a position, in a file that no other process writes."""
        with _naming(self._path):
            while content:
                count = os.pwrite(self._descriptor, content[:WRITE_BYTES], position)
                content, position = content[count:], position + count
        if not self._begun:
            self._begun = True
            announce("commit.file_write")

    def read_at(self, position: int, into: memoryview) -> None:
        """Read back what was written; raises DamagedCheckpoint where the file ends before."""
        with _naming(self._path):
            fill(self._descriptor, [into] if into else [], position, self._path.name)

    def sync(self) -> None:
        """Make durable what this process has written."""
        announce("commit.fsync")
        with _naming(self._path):
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Let go of the file."""
        self._beside.shutdown()
        os.close(self._descriptor)


def create_empty(path: Path) -> Path:
    """Make a new file of no bytes, and its folder if need be; raises FileExistsError when it is there.

    Returns `path`.
    """
    make_dir(path.parent)
    path.touch(exist_ok=False)
    return path


def make_dir(path: Path) -> None:
    """Make a directory and its parents, as far as they are not there."""
    path.mkdir(parents=True, exist_ok=True)


def make_private_dir(path: Path) -> None:
    """Make a directory that only its owner may enter; raises FileExistsError when it is there."""
    path.mkdir(mode=0o700)


def make_dir_durably(path: Path) -> None:
    """The same, and its name survives a power cut, with those of its parents, whoever made them."""
    make_dir(path)
    for parent in path.absolute().parents:
        with suppress(PermissionError):  # nothing was made in a folder that may not be read
            fsync_dir(parent)
        if parent.is_mount():
            break


def make_new_dir(path: Path) -> None:
    """Make a directory, and its parents if need be; raises FileExistsError when it is there."""
    path.mkdir(parents=True)


def fsync_file(path: Path) -> None:
    """Make what any process has written to a file durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_dir(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_files(root: Path) -> None:
    """Make the content of all files below a directory durable, their names not yet."""
    for path in root.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                with _naming(path):
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)


def fsync_tree(root: Path) -> None:
    """Make the names in a directory and in all below it durable, the deepest first."""
    for directory in sorted({root, *root.rglob("*/")}, key=lambda path: -len(path.parts)):
        fsync_dir(directory)


def rename(path: Path, target: Path) -> Path:
    """Give a file or directory another name on the same disk; a file that has the name goes. Returns `target`."""
    return path.rename(target)


def rename_durably(path: Path, target: Path) -> Path:
    """The same within one directory, and the new name survives a power cut."""
    rename(path, target)
    fsync_dir(target.parent)
    return target


def exchange(path: Path, other: Path) -> bool:
    """Give two files or directories on one disk each other's names in one step; False where the system or the file
    system cannot, and nothing was done."""
    if (code := _swap(os.fspath(path), os.fspath(other))) in CANNOT_EXCHANGE:
        return False
    if code:
        raise OSError(code, os.strerror(code), str(path), None, str(other))
    return True


def _swap(path: str, other: str) -> int:
    """The error of Linux' call for it, 0 for none."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return errno.ENOSYS
    done = call(AT_FDCWD, os.fsencode(path), AT_FDCWD, os.fsencode(other), ctypes.c_uint(RENAME_EXCHANGE))
    return ctypes.get_errno() if done else 0


def link(source: Path, target: Path) -> None:
    """Give the file `source` the second name `target`."""
    os.link(source, target)


def remove_file(path: Path, *, missing_ok: bool = False) -> None:
    """Remove a file or a link; raises FileNotFoundError when there is none, unless `missing_ok`."""
    path.unlink(missing_ok=missing_ok)


def remove_file_durably(path: Path) -> None:
    """Remove a file if it is there; it does not come back after a power cut."""
    remove_file(path, missing_ok=True)
    fsync_dir(path.parent)


def remove_dir(path: Path, *, ignore_errors: bool = False) -> None:
    """Remove a directory with all that it holds."""
    shutil.rmtree(path, ignore_errors=ignore_errors)


def remove(path: Path) -> None:
    """Remove a directory with all that it holds, or a file or link; raises FileNotFoundError when there is nothing."""
    # A user may have moved a checkpoint to other storage and left a link; of that, only the link is ours to delete.
    if path.is_dir() and not path.is_symlink():
        remove_dir(path)
    else:
        remove_file(path)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Give errors a file name: what write and fsync raise has none, and with it the rank that failed."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
