"""Appends log lines from any number of processes to a file of limited size."""

import os
from pathlib import Path

from rlhf.storage.files import make_dir, open_to_append, rename

LIMIT_BYTES = 32 << 20


class LogFile:
    """Appends to the file `path`, without a sync. Before the file exceeds `limit` bytes, renames it to `<name>.1`,
    replacing an earlier file of that name, and begins a new file. Raises OSError on a disk error."""

    def __init__(self, path: Path, limit: int = LIMIT_BYTES) -> None:
        self._path, self._limit = path, limit
        make_dir(path.parent)
        self._fd = open_to_append(self._path)

    def write(self, text: str) -> None:
        """Append whole lines with one write."""
        data = text.encode(errors="backslashreplace")
        now = os.fstat(self._fd)
        if now.st_size and now.st_size + len(data) > self._limit:
            # Another process may have renamed the file already.
            if self._path.exists() and os.path.samestat(now, self._path.stat()):
                rename(self._path, self._path.with_name(f"{self._path.name}.1"))
            self.close()
            self._fd = open_to_append(self._path)
        while data:
            data = data[os.write(self._fd, data) :]

    def close(self) -> None:
        os.close(self._fd)
