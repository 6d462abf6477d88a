"""Reads and verifies files of a remote copy block by block, without writing to a disk."""

import errno
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from rlhf.checkpoint.remote.remote_store import CHUNK, THREADS, RemoteStore, object_name
from rlhf.checkpoint.remote.retries import Retries, one_line
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.hashing import BLOCK, HASH_DIGITS
from rlhf.storage.reading import CheckedFiles, Range

T = TypeVar("T")
FINAL = (ImportError, ValueError, PermissionError, FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""Errors that a retry cannot fix."""


class RemoteFiles(CheckedFiles):
    """Reads and verifies files of the copy of `step` in `store`, in parts of CHUNK bytes, THREADS parts in parallel.

    Reads raise DamagedCheckpoint as in CheckedFiles, and OSError if the network fails.
    """

    def __init__(self, store: RemoteStore, step: int, files: Mapping[str, Mapping[str, Any]], retries: Retries) -> None:
        super().__init__(Path(), files)
        self._store, self._step, self._retries = store, step, retries

    def check_entry(self, name: str) -> None:
        """Check that an object exists and has the manifest's size, without reading it."""
        size = self.size(name)
        if (found := self._call(name, self._store.size)) != size:
            raise DamagedCheckpoint(f"{name}: {found} bytes instead of {size}")

    def _read_blocks(self, name: str, parts: dict[int, list[Range]]) -> None:
        groups = [list(group) for _, group in groupby(sorted(parts), lambda number: number // (CHUNK // BLOCK))]
        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(lambda group: self._read_group(name, group, parts), groups))

    def _read_group(self, name: str, numbers: list[int], parts: dict[int, list[Range]]) -> None:
        first, size = numbers[0] * BLOCK, self.size(name)
        end = min((numbers[-1] + 1) * BLOCK, size)
        content = memoryview(self._call(name, lambda path: self._store.part(path, first, end)))
        if len(content) != end - first:
            raise DamagedCheckpoint(f"{name}: ends at byte {first + len(content)}")
        for number in numbers:
            block = content[number * BLOCK - first : (number + 1) * BLOCK - first]
            expected = self._files[name]["xxh3_128"][number * HASH_DIGITS : (number + 1) * HASH_DIGITS]
            if xxhash.xxh3_128_hexdigest(block) != expected:
                raise DamagedCheckpoint(f"{name}: content differs from its hash")
            for start, into in parts[number]:
                into[:] = content[start - first : start - first + len(into)]

    def _call(self, name: str, action: Callable[[str], T]) -> T:
        try:
            return call_remote(self._retries, f"reading {name}", partial(action, object_name(self._step, name)))
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            raise DamagedCheckpoint(f"{name}: missing") from None


def call_remote(retries: Retries, what: str, action: Callable[[], T]) -> T:
    """Return the result of a network call. Raise errors for a missing object unchanged, and any other error of the
    client as an OSError with the remote's name."""
    try:
        return retries.call(what, action, final=FINAL)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise
    except Exception as error:
        raise OSError(errno.EIO, one_line(error), retries.remote) from error
