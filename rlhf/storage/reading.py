"""Reads a checkpoint's files and compares each block with its hash on the way to its destination.

Imports no torch, because `python -m rlhf.checkpoint verify` imports this module.
"""

import errno
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from rlhf.storage.disk_errors import DamagedCheckpoint, is_unreadable
from rlhf.storage.hashing import BLOCK, HASH_DIGITS

THREADS = 4
# Bytes per read: so few that they stay in the processor's cache until they are hashed. Also the size of the scratch
# memory for unwanted bytes.
PART = 256 << 10
BUFFERS_PER_READ = min(1024, os.sysconf("SC_IOV_MAX"))

Range = tuple[int, memoryview]
"""Position in a file, and the memory for the bytes from there on."""


class CheckedFiles:
    """Reads and verifies the files below `root` that a manifest describes (`files`: path -> size and hashes).

    A read raises DamagedCheckpoint ("<path>: <problem>") if the file is missing or cut off, or if a block that it reads
    does not match its hash. The destination's content is then undefined. `checked` has the numbers of verified blocks
    by path; `bytes_read` counts the bytes of these blocks.
    """

    def __init__(self, root: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
        self._root, self._files = root, files
        self._elsewhere: dict[str, Path] = {}
        self.checked: dict[str, set[int]] = {}
        self.bytes_read = 0

    def find_below(self, root: Path, names: Iterable[str]) -> None:
        """Look for the files `names` below another directory from now on."""
        self._elsewhere |= dict.fromkeys(names, root)

    def check_entry(self, name: str) -> None:
        """Raise DamagedCheckpoint unless the file is inside the checkpoint, with the manifest's size. Read no bytes."""
        root, size = self._elsewhere.get(name, self._root), self._entry(name)["size"]
        path = root / name
        with _damage(name):
            if not path.is_file():
                raise DamagedCheckpoint(f"{name}: missing")
            if not path.resolve().is_relative_to(root.resolve()):
                raise DamagedCheckpoint(f"{name}: a link that points outside the checkpoint")
            if (found := path.stat().st_size) != size:
                raise DamagedCheckpoint(f"{name}: {found} bytes instead of {size}")

    def blocks(self, name: str) -> range:
        """Return the numbers of a file's blocks."""
        return range(-(-self._files[name]["size"] // BLOCK))

    def size(self, name: str) -> int:
        return self._entry(name)["size"]

    def content(self, name: str) -> bytes:
        return self.start(name, self._entry(name)["size"])

    def document(self, name: str) -> Any:
        return parse_json(self.content(name), name)

    def start(self, name: str, size: int) -> bytes:
        """Return the first `size` bytes of a file, or all bytes of a shorter file."""
        content = bytearray(min(size, self._entry(name)["size"]))
        self.read(name, [(0, memoryview(content))])
        return bytes(content)

    def read(self, name: str, ranges: Iterable[Range]) -> None:
        """Fill every range with its bytes of the file; ranges must not overlap."""
        size = self._entry(name)["size"]
        parts: dict[int, list[Range]] = {}
        for start, view in sorted(ranges, key=lambda part: part[0]):
            if start + len(view) > size:
                raise DamagedCheckpoint(f"{name}: ends before byte {start + len(view)}, which an index lists")
            while view:
                length = BLOCK - start % BLOCK
                parts.setdefault(start // BLOCK, []).append((start, view[:length]))
                start, view = start + length, view[length:]
        self._read_blocks(name, parts)

    def verify_blocks(self, name: str, blocks: Iterable[int]) -> None:
        """Read blocks only to compare them with their hashes."""
        self._read_blocks(name, {number: [] for number in blocks})

    def parts(self, name: str, number: int) -> Iterator[tuple[int, memoryview]]:
        """Yield the bytes of a block in parts, each with its position in the file. A part is valid until the next part.
        Compares the hash after the last part, and raises DamagedCheckpoint if the hash differs."""
        entry, digest, memory = self._entry(name), xxhash.xxh3_128(), memoryview(bytearray(PART))
        with _damage(name), _regular(self._elsewhere.get(name, self._root) / name, f"{name}:") as descriptor:
            end = min((number + 1) * BLOCK, entry["size"])
            for position in range(number * BLOCK, end, PART):
                view = memory[: end - position]
                fill(descriptor, [view], position, name)
                digest.update(view)
                yield position, view
        self._compare(name, number, digest.hexdigest())

    def compare_block(self, name: str, number: int, content: Iterable[memoryview]) -> None:
        """Raise DamagedCheckpoint unless `content`, read elsewhere, matches the hash of a block."""
        digest = xxhash.xxh3_128()
        for view in content:
            digest.update(view)
        self._compare(name, number, digest.hexdigest())

    def _compare(self, name: str, number: int, found: str) -> None:
        if found != self._entry(name)["xxh3_128"][number * HASH_DIGITS : (number + 1) * HASH_DIGITS]:
            raise DamagedCheckpoint(f"{name}: content differs from its hash")

    def _entry(self, name: str) -> Mapping[str, Any]:
        if name not in self._files:
            raise DamagedCheckpoint(f"{name}: not in the manifest")
        return self._files[name]

    def _read_blocks(self, name: str, parts: dict[int, list[Range]]) -> None:
        if not parts:
            return
        with _damage(name), _regular(self._elsewhere.get(name, self._root) / name, f"{name}:") as descriptor:
            read = partial(self._read_block, descriptor, name)
            if len(parts) == 1:
                read(*next(iter(parts.items())))
            else:
                with ThreadPoolExecutor(min(THREADS, len(parts))) as threads:
                    list(threads.map(read, parts.keys(), parts.values()))
        self.checked.setdefault(name, set()).update(parts)
        self.bytes_read += sum(min(BLOCK, self._files[name]["size"] - number * BLOCK) for number in parts)

    def _read_block(self, descriptor: int, name: str, number: int, wanted: list[Range]) -> None:
        entry, position = self._files[name], number * BLOCK
        end = min(position + BLOCK, entry["size"])
        digest, scratch = xxhash.xxh3_128(), memoryview(bytearray(PART))
        for views in _reads(position, end, wanted, scratch):
            fill(descriptor, views, position, name)
            for view in views:
                digest.update(view)
                position += len(view)
        self._compare(name, number, digest.hexdigest())


class UnverifiedFiles(CheckedFiles):
    """Reads the files `names` below `root`, at their present sizes, without hashes. Raises DamagedCheckpoint for a
    missing file."""

    def __init__(self, root: Path, names: Iterable[str]) -> None:
        super().__init__(root, {name: {"size": _size_of(root / name, name)} for name in names})

    def _read_block(self, descriptor: int, name: str, number: int, wanted: list[Range]) -> None:
        for start, into in wanted:
            fill(descriptor, [into], start, name)


def parse_json(content: bytes, name: str) -> Any:
    """Parse the bytes `content` of the file `name` as JSON; raises DamagedCheckpoint when they are not JSON."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{name}: is not valid JSON: {error}") from None


def read_regular(path: Path, limit: int) -> bytes:
    """Return the bytes of a regular file of at most `limit` bytes. Raises DamagedCheckpoint for a larger file
    and for a path that is not a regular file, and OSError on other errors."""
    try:
        with _regular(path, str(path)) as descriptor:
            size = os.fstat(descriptor).st_size
            if size > limit:
                raise DamagedCheckpoint(f"{path} has {size} bytes; such a file has at most {limit}")
            content = bytearray(size)
            fill(descriptor, [memoryview(content)] if content else [], 0, str(path))
            return bytes(content)
    except OSError as error:
        if not is_unreadable(error):
            raise
        raise DamagedCheckpoint(f"{path} cannot be read: {error.strerror}") from error


@contextmanager
def _regular(path: Path, name: str) -> Iterator[int]:
    """Open a regular file; raises DamagedCheckpoint for a pipe or a device, whose read may never end."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.ELOOP):  # the path is a socket or a cycle of links
            raise DamagedCheckpoint(f"{name} is not a regular file") from error
        raise
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise DamagedCheckpoint(f"{name} is not a regular file")
        yield descriptor
    finally:
        os.close(descriptor)


def _size_of(path: Path, name: str) -> int:
    with _damage(name), _regular(path, f"{name}:") as descriptor:
        return os.fstat(descriptor).st_size


@contextmanager
def _damage(name: str) -> Iterator[None]:
    """Raise DamagedCheckpoint if the file `name` is missing or the disk lost its data; raise other errors unchanged."""
    try:
        yield
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise DamagedCheckpoint(f"{name}: missing") from None
    except OSError as error:
        if not is_unreadable(error):
            raise
        raise DamagedCheckpoint(f"{name}: cannot be read: {error.strerror}") from error


def _reads(position: int, end: int, wanted: list[Range], scratch: memoryview) -> Iterator[list[memoryview]]:
    """Yield the buffers of each read of the bytes [position, end): buffers of `wanted`, and `scratch` for the gaps."""
    views: list[memoryview] = []
    filled = 0
    for start, into in [*wanted, (end, memoryview(b""))]:
        for gap, stop in ((True, start), (False, start + len(into))):
            while position < stop:
                if filled == PART or len(views) == BUFFERS_PER_READ:
                    yield views
                    views, filled = [], 0
                length = min(stop - position, PART - filled)
                source, offset = (scratch, filled) if gap else (into, position - start)
                views.append(source[offset : offset + length])
                position, filled = position + length, filled + length
    yield views


def fill(descriptor: int, views: list[memoryview], position: int, name: str) -> None:
    """Fill `views` in order with bytes from `position` on; raise DamagedCheckpoint, with `name`, at an early end."""
    while views:
        count = os.preadv(descriptor, views, position)
        if not count:
            raise DamagedCheckpoint(f"{name}: ends at byte {position}")
        position += count
        while views and count >= len(views[0]):
            count -= len(views[0])
            views = views[1:]
        if count:
            views = [views[0][count:], *views[1:]]
