"""Writes lines to pipes whose reader may be stuck, such as a pager that waits for a key."""

import os
import select
import stat
import threading
import time

READER_TIMEOUT_S = 10.0
"""Longest wait for a reader. After this wait the writer drops lines until the reader reads again."""


class UnreadPipe(Exception):
    """A PipeWriter has begun to drop lines, because no process reads the pipe."""


class PipeWriter:
    """Writes whole lines to pipes and waits at most READER_TIMEOUT_S for a reader.

    A reader that reads again first receives the number of missed lines.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._missed: dict[int, tuple[int, bytes]] = {}

    def write(self, fd: int, line: bytes) -> None:
        """Write `line` to the pipe `fd`, or drop the line. Raises UnreadPipe for the first dropped line."""
        with self._lock:
            missed, line_end = self._missed.get(fd, (0, b""))
            notice = f"(lines that were not read in time, see run.log: {missed:,})\n" if missed else ""
            data = line_end + notice.encode() + line
            written = _write(fd, data, 0.0 if missed else READER_TIMEOUT_S)
            if written == len(data):
                self._missed.pop(fd, None)
                return
            # End a partly written line before the next line.
            self._missed[fd] = missed + 1, b"\n" if written else line_end
        if not missed:
            raise UnreadPipe


def is_pipe(fd: int) -> bool:
    """Return whether `fd` is a pipe or a socket."""
    mode = os.fstat(fd).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def _write(fd: int, data: bytes, timeout_s: float) -> int:
    """Write `data` as far as the pipe accepts bytes in time, and return the number of bytes written."""
    end = time.monotonic() + timeout_s
    written = 0
    poll = select.poll()
    poll.register(fd, select.POLLOUT)  # ready when the pipe accepts select.PIPE_BUF bytes, or is broken
    while written < len(data) and poll.poll(1000 * max(0.0, end - time.monotonic())):
        written += os.write(fd, data[written : written + select.PIPE_BUF])
    return written
