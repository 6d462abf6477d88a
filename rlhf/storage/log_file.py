"""Log file: lines for people, appended by any number of processes, bounded in size."""

import os
from pathlib import Path

from rlhf.storage.files import make_dir, open_to_append, rename

LIMIT_BYTES = 32 << 20


class LogFile:
    """The file `path`, made if it is not there and always appended to; nothing is synced.

    Before it outgrows `limit` bytes it becomes `<name>.1`, over an earlier one, and a new one begins. Raises OSError
    where the disk refuses it.
    """

    def __init__(self, path: Path, limit: int = LIMIT_BYTES) -> None:
        self._path, self._limit = path, limit
        make_dir(path.parent)
        self._fd = self._opened()

    def write(self, text: str) -> None:
        """Append whole lines, in one piece."""
        data = text.encode(errors="backslashreplace")
        now = os.fstat(self._fd)
        if now.st_size and now.st_size + len(data) > self._limit:
            # Another process may have moved it already.
            if self._path.exists() and os.path.samestat(now, self._path.stat()):
                rename(self._path, self._path.with_name(f"{self._path.name}.1"))
            self.close()
            self._fd = self._opened()
        while data:
            data = data[os.write(self._fd, data) :]

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._fd)

    def _opened(self) -> int:
        return open_to_append(self._path)
