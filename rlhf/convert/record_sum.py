"""Verifies the CRC-32 of a zip archive's record while ranges of the record are read."""

import os
import threading
import zlib
from dataclasses import dataclass, field
from pathlib import Path

from rlhf.storage.disk_errors import DamagedCheckpoint

COPY_AGAIN = "Copy the file again from where it was saved."
AHEAD_BYTES = 1 << 20
"""Bytes per read, if the bytes are needed only for the checksum."""


@dataclass
class RecordSum:
    """Compares the CRC-32 of bytes [start, stop) of a file with the archive's `crc`; 0: the writer computed none.

    Several threads may read ranges in any order. A range that continues the summed bytes is added at once. `update`
    reads the rest itself if at most a quarter is left, or if half was read and the new range leaves a gap. Without
    this read, a record with rarely read bytes, such as padding at the end of a partition, would never be compared.
    """

    path: Path
    start: int
    stop: int
    crc: int
    _at: int = field(init=False)
    _sum: int = 0
    _seen: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._at = self.start

    def update(self, descriptor: int, position: int, view: memoryview) -> None:
        """Add bytes read at `position`. Raises DamagedCheckpoint if the sum of all bytes differs from `crc`."""
        with self._lock:
            if not self.crc or self._at == self.stop:
                return
            size, jumped = self.stop - self.start, position > self._at
            self._add(view[max(0, self._at - position) :] if not jumped else view[:0])
            self._seen += len(view)
            if 4 * (self.stop - self._at) <= size or (jumped and 2 * self._seen >= size):
                self._compare(descriptor)

    def _add(self, part: bytes | memoryview) -> None:
        self._sum = zlib.crc32(part, self._sum)
        self._at += len(part)

    def _compare(self, descriptor: int) -> None:
        while self._at < self.stop:
            if not (part := os.pread(descriptor, min(AHEAD_BYTES, self.stop - self._at), self._at)):
                raise DamagedCheckpoint(f"{self.path} is truncated: it ends at byte {self._at}")
            self._add(part)
        if self._sum != self.crc:
            where = f"bytes {self.start} to {self.stop}"
            raise DamagedCheckpoint(f"{self.path} is damaged: {where} do not have the archive's CRC-32. {COPY_AGAIN}")
