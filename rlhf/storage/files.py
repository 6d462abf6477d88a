"""Writes, syncs, renames, links and removes files: all changes in a run directory go through these functions.

Results of functions named `..._durably` survive a power cut. A power cut may undo other changes until the caller
syncs them (`fsync_file`, `fsync_tree`).
"""

import ctypes
import errno
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh3_128_hexdigest

from rlhf.events import announce
from rlhf.storage.hashing import BLOCK, BlockHashes
from rlhf.storage.layout import TEMPORARY
from rlhf.storage.reading import fill

WRITE_BYTES = 512 << 10
"""Bytes per write. For larger writes the kernel searches for larger pieces of free memory: on ext4 a GiB took 1.3 s of
CPU time in writes of 8 MiB, and 0.2 s in writes of up to 1 MiB."""
AT_FDCWD, RENAME_EXCHANGE = -100, 2
"""Linux constants for renameat2: paths relative to the working directory; exchange of two names."""
CANNOT_EXCHANGE = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP}


@dataclass(frozen=True)
class WrittenFile:
    """One file of a checkpoint: relative path, size in bytes, and the concatenated xxh3-128 in hex of each block. A
    file of one block (4 MiB) has the hash that `xxhsum -H2` prints."""

    path: str
    size: int
    xxh3_128: str


def write_file(root: Path, path: str, chunks: Iterable[bytes | memoryview]) -> WrittenFile:
    """Write `chunks` to the new file `root/path`, fsync it, and return its hashes, computed from memory. Raises
    FileExistsError if the file exists, because no checkpoint file is ever overwritten in place."""
    target = root / path
    make_dir(target.parent)
    hashes = BlockHashes()
    with _naming(target), target.open("xb", buffering=0) as file, ThreadPoolExecutor(1) as hasher:
        for number, chunk in enumerate(chunks):
            view = memoryview(chunk).cast("B")
            # Even a write into memory takes three times as long as its hash, so hashing on a free core costs no time.
            hashing = hasher.submit(hashes.update, view) if len(view) >= BLOCK else None
            if hashing is None:
                hashes.update(view)
            while view:
                view = view[file.write(view[:WRITE_BYTES]) :]
            if hashing is not None:
                hashing.result()
            if number == 0:  # so far only the header of a safetensors file is written
                announce("commit.file_write")
        announce("commit.fsync")
        os.fsync(file.fileno())
    return WrittenFile(path, hashes.size, hashes.hexdigests())


def hash_in_memory(path: str, content: bytes) -> WrittenFile:
    """Return the entry that a file `path` with `content` would have, without writing the file."""
    hashes = BlockHashes()
    hashes.update(memoryview(content))
    return WrittenFile(path, hashes.size, hashes.hexdigests())


def write_json(root: Path, path: str, document: object) -> WrittenFile:
    """Write `document` as JSON; floats keep every bit (Python writes the shortest text that reads back equal)."""
    return write_file(root, path, [(json.dumps(document, indent=1, sort_keys=True) + "\n").encode()])


def replace_durably(path: Path, content: str | bytes) -> None:
    """Replace the content of the small file `path`. Readers see either the old content or the new content."""
    fresh = path.with_name(f"{TEMPORARY}{path.name}")
    with _naming(path), fresh.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    fsync_dir(path.parent)


def append_durably(path: Path, chunks: Iterable[bytes], event: str | None = None) -> int:
    """Append `chunks` to a file, creating it if missing, announce `event`, and sync; return the bytes of `chunks`."""
    fresh = not path.exists()
    with _naming(path), path.open("ab") as file:
        written = sum(map(file.write, chunks))
        file.flush()
        if event is not None:
            announce(event)
        os.fsync(file.fileno())
    if fresh:
        fsync_dir(path.parent)
    return written


def open_to_append(path: Path) -> int:
    """Open a file for atomic appends by several processes, creating it if missing; nothing is synced."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)


def truncate(path: Path, size: int) -> None:
    os.truncate(path, size)


def write_small(path: Path, content: bytes) -> None:
    """Write or overwrite a small file that no process needs after a crash."""
    path.write_bytes(content)


def write_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write small files that no process needs after a crash. Remove all other files of `folder`, except files that are
    open in a dying process over NFS."""
    if folder.exists():
        remove_dir(folder, ignore_errors=True)
    make_dir(folder)
    for name, content in files.items():
        write_small(folder / name, content)


def write_private(path: Path, content: bytes) -> None:
    """Write a small file that only its owner may read, atomically."""
    fresh = path.with_name(f"{TEMPORARY}{path.name}")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def write_range(path: Path, size: int, offset: int, content: memoryview) -> None:
    """Write `content` at `offset` of a sparse file of `size` bytes, creating it if missing. Nothing is synced."""
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
    """Opens the file `root/path`, creating it if missing, for writes in any order by several processes, one per block.

    Only `sync` syncs. A block begins at a multiple of 4 MiB, so that no two processes write one page: a network file
    system may lose one of the two writes.
    """

    def __init__(self, root: Path, path: str) -> None:
        self._path, self._begun = root / path, False
        make_dir(self._path.parent)
        self._hasher = ThreadPoolExecutor(1)
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def write(self, number: int, content: memoryview) -> str:
        """Write all bytes of a block; return their hash."""
        hashing = self._hasher.submit(xxh3_128_hexdigest, content)
        self.write_at(number * BLOCK, content)
        return hashing.result()

    def write_at(self, position: int, content: memoryview) -> None:
        """Write `content` at `position`. No other process may write to the same 4 MiB block."""
        with _naming(self._path):
            while content:
                count = os.pwrite(self._descriptor, content[:WRITE_BYTES], position)
                content, position = content[count:], position + count
        if not self._begun:
            self._begun = True
            announce("commit.file_write")

    def read_at(self, position: int, into: memoryview) -> None:
        """Read back written bytes; raises DamagedCheckpoint where the file ends too early."""
        with _naming(self._path):
            fill(self._descriptor, [into] if into else [], position, self._path.name)

    def sync(self) -> None:
        announce("commit.fsync")
        with _naming(self._path):
            os.fsync(self._descriptor)

    def close(self) -> None:
        self._hasher.shutdown()
        os.close(self._descriptor)


def create_empty(path: Path) -> Path:
    """Create an empty file, and its folder if missing; return `path`. Raises FileExistsError when the file exists."""
    make_dir(path.parent)
    path.touch(exist_ok=False)
    return path


def make_dir(path: Path) -> None:
    """Create a directory and its missing parents."""
    path.mkdir(parents=True, exist_ok=True)


def make_private_dir(path: Path) -> None:
    """Create a directory that only its owner may enter; raises FileExistsError when it exists."""
    path.mkdir(mode=0o700)


def make_dir_durably(path: Path) -> None:
    """Create a directory and its parents; sync all their names, whoever created them."""
    make_dir(path)
    for parent in path.absolute().parents:
        with suppress(PermissionError):  # nothing was created in an unreadable folder
            fsync_dir(parent)
        if parent.is_mount():
            break


def renew(path: Path) -> None:
    """Set the modification time of a file to now."""
    os.utime(path)


def make_new_dir(path: Path) -> None:
    """Create a directory, and its parents if missing; raises FileExistsError when the directory exists."""
    path.mkdir(parents=True)


def fsync_file(path: Path) -> None:
    """Sync what any process has written to a file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with _naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_dir(path: Path) -> None:
    """Sync the names in a directory."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with _naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_files(root: Path) -> None:
    """Sync the content of all files below a directory, but not their names."""
    for path in root.rglob("*"):
        if path.is_file():
            fsync_file(path)


def fsync_tree(root: Path) -> None:
    """Sync the names in a directory and in all directories below it, the deepest first."""
    for directory in sorted({root, *root.rglob("*/")}, key=lambda path: -len(path.parts)):
        fsync_dir(directory)


def rename(path: Path, target: Path) -> Path:
    """Rename a file or directory on the same disk, replacing a file of that name; return `target`."""
    return path.rename(target)


def rename_durably(path: Path, target: Path) -> Path:
    """Rename within one directory, and sync the new name; return `target`."""
    rename(path, target)
    fsync_dir(target.parent)
    return target


def exchange(path: Path, other: Path) -> bool:
    """Exchange the names of two files or directories on one disk atomically; return False if this is not supported."""
    if (code := _swap(os.fspath(path), os.fspath(other))) in CANNOT_EXCHANGE:
        return False
    if code:
        raise OSError(code, os.strerror(code), str(path), None, str(other))
    return True


def _swap(path: str, other: str) -> int:
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return errno.ENOSYS
    done = call(AT_FDCWD, os.fsencode(path), AT_FDCWD, os.fsencode(other), ctypes.c_uint(RENAME_EXCHANGE))
    return ctypes.get_errno() if done else 0


def link(source: Path, target: Path) -> None:
    os.link(source, target)


def remove_file(path: Path, *, missing_ok: bool = False) -> None:
    """Remove a file or link; raises FileNotFoundError when it is missing, unless `missing_ok`."""
    path.unlink(missing_ok=missing_ok)


def remove_file_durably(path: Path) -> None:
    """Remove a file if it exists, and sync its removal."""
    remove_file(path, missing_ok=True)
    fsync_dir(path.parent)


def remove_dir(path: Path, *, ignore_errors: bool = False) -> None:
    """Remove a directory tree of any depth. With `ignore_errors`, remove all that can be removed, also from directories
    without permissions, and raise no OSError."""
    try:
        shutil.rmtree(path)
    except (OSError, RecursionError) as error:
        # Programs that a policy writes have left 1,000 nested directories, too many for the stack or for open files.
        is_deep = isinstance(error, RecursionError) or error.errno == errno.EMFILE
        if not is_deep and not ignore_errors:
            raise
    else:
        return
    with suppress(OSError) if ignore_errors else nullcontext():
        _remove_flattened(path, force=ignore_errors)


def _remove_flattened(path: Path, *, force: bool) -> None:
    """Remove a directory tree with few open files and short names: move each nested directory to the top first."""
    with _opened(path, force) as top:
        waiting = _emptied(top, top, force)
        while waiting:
            name = waiting.pop()
            with suppress(OSError) if force else nullcontext():
                with _opened(name, force, top) as directory:
                    waiting += _emptied(directory, top, force)
                os.rmdir(name, dir_fd=top)
    path.rmdir()


@contextmanager
def _opened(path: Path | str, force: bool, parent: int | None = None) -> Iterator[int]:
    if force and stat.S_ISDIR(os.stat(path, dir_fd=parent, follow_symlinks=False).st_mode):
        os.chmod(path, stat.S_IRWXU, dir_fd=parent)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _emptied(directory: int, top: int, force: bool) -> list[str]:
    """Remove the directory's files, and move its directories to the directory `top`; return their new names."""
    moved = []
    with os.scandir(directory) as listed:
        entries = list(listed)
    for entry in entries:
        with suppress(OSError) if force else nullcontext():
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.name, dir_fd=directory)
                continue
            if force:
                os.chmod(entry.name, stat.S_IRWXU, dir_fd=directory)  # a move changes the entry ".." of the directory
            name = f"{TEMPORARY}{secrets.token_hex(8)}"
            os.rename(entry.name, name, src_dir_fd=directory, dst_dir_fd=top)
            moved.append(name)
    return moved


def remove(path: Path) -> None:
    """Remove a directory tree, a file or a link; raises FileNotFoundError when `path` is missing."""
    # A user may have moved a checkpoint to other storage and left a link. Then delete only the link.
    if path.is_dir() and not path.is_symlink():
        remove_dir(path)
    else:
        remove_file(path)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Add the missing file name to an OSError of write or fsync. The name also shows which rank failed."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
