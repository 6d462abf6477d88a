"""Follows metrics.jsonl while another process writes the file, and detects when a resume cuts it."""

import json
import os
from collections import deque
from pathlib import Path

import xxhash

from rlhf.tracking.history import Record

REMEMBERED = 10_000
"""Number of newest lines to compare with the file. A resume usually cuts a few dozen lines."""
TAIL_BYTES = 1 << 20


class HistoryFollower:
    """Returns each record that is appended after the follower's creation.

    A resume or a rollback cuts the file and repeats steps; the follower returns repeated steps again. A cut does not
    always shorten the file, which may grow again between two calls. So the follower compares the position and hash of
    the lines that it has read.
    """

    def __init__(self, path: Path, *, from_tail: bool = False) -> None:
        """`from_tail`: also return the records of the last TAIL_BYTES."""
        self._path = path
        self._known: deque[tuple[int, int, int]] = deque(maxlen=REMEMBERED)
        """Start, end and hash of each line read."""
        self._base = self._end = self._tail()
        if not from_tail:
            self.new()

    def _tail(self) -> int:
        """Return the position of the first line within the last TAIL_BYTES."""
        if not self._path.exists():
            return 0
        with self._path.open("rb") as file:
            start = file.seek(0, os.SEEK_END) - TAIL_BYTES
            if start <= 0:
                return 0
            file.seek(start)
            return start + len(file.readline())

    def new(self) -> list[Record]:
        """Return the records completed since the last call, in the file's order."""
        if not self._path.exists():
            self._known.clear()
            self._base = self._end = 0
            return []
        records = []
        with self._path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            while self._known and not _has_line(file.fileno(), *self._known[-1]):
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


def _has_line(fd: int, start: int, end: int, digest: int) -> bool:
    return xxhash.xxh3_64_intdigest(os.pread(fd, end - start, start)) == digest
