"""Writer of lines to pipes that nobody may read, such as that of a pager that waits for a key."""

import os
import select
import stat
import threading
import time

PATIENCE_S = 10.0
"""Longest wait for a reader, once; while it does not read, further lines are dropped."""


class UnreadPipe(Exception):
    """A pipe begins to drop lines."""


class PipeWriter:
    """Writes whole lines to any pipes, without waiting for their readers for longer than PATIENCE_S.

    Once a reader reads again it is told how many lines it has missed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._missed: dict[int, tuple[int, bytes]] = {}

    def write(self, fd: int, line: bytes) -> None:
        """Write `line` to the pipe `fd`, or drop it; raises UnreadPipe for the first one that is dropped."""
        with self._lock:
            missed, line_end = self._missed.get(fd, (0, b""))
            told = f"(nobody read, so these lines are in the log of the run only: {missed:,})\n" if missed else ""
            data = line_end + told.encode() + line
            written = _write(fd, data, 0.0 if missed else PATIENCE_S)
            if written == len(data):
                self._missed.pop(fd, None)
                return
            # What was begun is ended before anything else.
            self._missed[fd] = missed + 1, b"\n" if written else line_end
        if not missed:
            raise UnreadPipe


def is_pipe(fd: int) -> bool:
    """Whether `fd` is a pipe or a socket."""
    mode = os.fstat(fd).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def has_room(fd: int, wait_s: float) -> bool:
    """Whether `fd` takes select.PIPE_BUF bytes without waiting, within `wait_s` seconds; also if it is broken."""
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(1000 * wait_s))


def _write(fd: int, data: bytes, patience_s: float) -> int:
    """Bytes for which there was room in time."""
    end = time.monotonic() + patience_s
    written = 0
    while written < len(data) and has_room(fd, max(0.0, end - time.monotonic())):
        written += os.write(fd, data[written : written + select.PIPE_BUF])
    return written
