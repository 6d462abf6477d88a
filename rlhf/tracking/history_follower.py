"""Follower of metrics.jsonl in another process than the one that writes it: records as they come, cuts noticed."""

import json
import os
from collections import deque
from pathlib import Path

import xxhash

from rlhf.tracking.history import Record

REMEMBERED = 10_000
"""Lines up to which a cut is traced back; a resume goes back to the newest checkpoint, a few dozen steps."""
TAIL_BYTES = 1 << 20


class HistoryFollower:
    """Gives each record that is appended after it was made.

    A resume or a roll-back cuts the file and writes the steps after the cut again; these are given again. What it has
    read is remembered by position and hash, since the file may have grown past its old end between two looks.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: deque[tuple[int, int, int]] = deque(maxlen=REMEMBERED)
        """Start, end and hash of each line that was read."""
        self._base = self._end = self._tail()
        self.new()

    def _tail(self) -> int:
        """Where the first of the last lines begins."""
        if not self._path.exists():
            return 0
        with self._path.open("rb") as file:
            start = file.seek(0, os.SEEK_END) - TAIL_BYTES
            if start <= 0:
                return 0
            file.seek(start)
            return start + len(file.readline())

    def new(self) -> list[Record]:
        """The whole records since the last call, in the file's order."""
        if not self._path.exists():
            self._known.clear()
            self._base = self._end = 0
            return []
        records = []
        with self._path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            while self._known and not _holds(file.fileno(), *self._known[-1]):
                self._known.pop()
                self._end = self._known[-1][1] if self._known else self._base
            if self._end > size:
                self._base = self._end = 0
            file.seek(self._end)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._known.append((self._end, self._end + len(line), xxhash.xxh3_64_intdigest(line)))
                self._end += len(line)
                records.append(json.loads(line))
        return records


def _holds(fd: int, start: int, end: int, digest: int) -> bool:
    return xxhash.xxh3_64_intdigest(os.pread(fd, end - start, start)) == digest
