"""Reads the ranks' output and progress from pipes, and shows both from the supervisor's process."""

import os
import selectors
import sys
import threading
from contextlib import suppress
from typing import Self

from rlhf.ranks.progress_pipe import PROGRESS_FD, dispatch_message
from rlhf.tracking.run_output import RunOutput

_READ_BYTES = 1 << 16
_LONGEST_LINE = 1 << 16
_STOP = b"stop"
# Largest number of reads of `drain`. Full pipes need fewer reads, but processes of dead ranks may print forever.
_DRAIN_READS = 64


class RankOutput:
    """Reads the ranks' stdout, stderr and progress from pipes, in a thread, while entered.

    The terminal then has a single writer: no line ends inside a progress bar, and no control characters reach it.
    """

    def __init__(self, output: RunOutput) -> None:
        self._output = output
        self._lock = threading.Lock()
        self._unread: dict[int, bytes] = {}
        reads, writes = zip(*(os.pipe() for _ in range(4)), strict=True)
        self._progress, self._of_stdout, self._of_stderr, self._wake = reads
        self.progress_fd, self.stdout, self.stderr, self._waker = writes
        """The write ends of the pipes, which the ranks inherit."""
        for fd in reads:
            os.set_blocking(fd, False)
        self._thread = threading.Thread(target=self._run, name="rank output", daemon=True)

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables for the ranks: the pipe for their progress, and whether to show download bars."""
        variables = {PROGRESS_FD: str(self.progress_fd)}
        # Without TQDM_POSITION, libraries write no download bars to a pipe.
        return variables | {"TQDM_POSITION": "-1"} if self._output.has_bar else variables

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.write(self._waker, _STOP)
        self._thread.join()
        self.drain()
        for fd in (self._progress, self._of_stdout, self._of_stderr, self._wake):
            os.close(fd)
        for fd in (self.progress_fd, self.stdout, self.stderr, self._waker):
            os.close(fd)

    def drain(self) -> None:
        """Show all output of ranks that have ended, including an unfinished line."""
        with self._lock:
            for _ in range(_DRAIN_READS):
                if not self._pump():
                    break
            for fd in (self._of_stdout, self._of_stderr):
                if rest := self._unread.pop(fd, b""):
                    self._show(fd, rest)

    def phase(self, name: str) -> None:
        """Show a phase in which no rank runs."""
        with self._lock:
            self._output.progress.phase(0, 0, name)

    def end_bar(self) -> None:
        self._output.end_bar()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for fd in (self._progress, self._of_stdout, self._of_stderr, self._wake):
                selector.register(fd, selectors.EVENT_READ)
            while True:
                ready = {key.fd for key, _ in selector.select()}
                with self._lock:
                    self._pump()
                if self._wake in ready:
                    return

    def _pump(self) -> bool:
        """Show what the pipes contain. Return whether they contained anything."""
        anything = False
        for fd in (self._progress, self._of_stdout, self._of_stderr):
            if data := _read(fd):
                anything = True
                *lines, rest = (self._unread.get(fd, b"") + data).split(b"\n")
                for line in lines:
                    self._show(fd, line)
                if len(rest) > _LONGEST_LINE:
                    self._show(fd, rest)
                    rest = b""
                # A download bar rewrites its line in place, so keep only its newest state.
                states = rest.split(b"\r")[-2:]
                if len(states) == 2:
                    self._output.note(_text(states[1] or states[0]))
                self._unread[fd] = b"\r".join(states)
        return anything

    def _show(self, fd: int, line: bytes) -> None:
        if fd == self._progress:
            with suppress(
                ValueError
            ):  # the user's code may write anything to the pipe, and this thread must survive it
                dispatch_message(line, self._output.progress)
            return
        text = _text(line.rstrip(b"\r").rpartition(b"\r")[2])
        self._output.line(text, sys.stdout if fd == self._of_stdout else None)


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, _READ_BYTES)
    except BlockingIOError:
        return b""


def _text(line: bytes) -> str:
    return line.decode(errors="backslashreplace")
