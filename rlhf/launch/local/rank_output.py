"""Output of the ranks on its way through the supervisor: what they print, and their progress."""

import os
import selectors
import sys
import threading
from contextlib import suppress
from typing import Self

from rlhf.ranks.progress_pipe import PROGRESS_FD, deliver
from rlhf.tracking.run_output import RunOutput

_READ_BYTES = 1 << 16
_LONGEST_LINE = 1 << 16
_STOP = b"stop"
# Pipes hold less, unless an orphan goes on to print.
_DRAIN_READS = 64


class RankOutput:
    """Pipes that take the place of the ranks' stdout and stderr, and one for their progress; a thread reads them.

    A terminal has one writer then, so that no line ends in the middle of a bar, and nothing from outside reaches it
    raw. While entered.
    """

    def __init__(self, output: RunOutput) -> None:
        self._output = output
        self._lock = threading.Lock()
        self._unread: dict[int, bytes] = {}
        reads, writes = zip(*(os.pipe() for _ in range(4)), strict=True)
        self._progress, self._of_stdout, self._of_stderr, self._wake = reads
        self.progress_fd, self.stdout, self.stderr, self._waker = writes
        """The ends for the ranks."""
        for fd in reads:
            os.set_blocking(fd, False)
        self._thread = threading.Thread(target=self._run, name="rank output", daemon=True)

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables by which ranks find the pipe for their progress."""
        variables = {PROGRESS_FD: str(self.progress_fd)}
        # Libraries show no bars of downloads to a pipe, unless this asks for them.
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
        """Say all that ranks have written so far, a line without an end included: of dead ones nothing more comes."""
        with self._lock:
            for _ in range(_DRAIN_READS):
                if not self._pump():
                    break
            for fd in (self._of_stdout, self._of_stderr):
                if rest := self._unread.pop(fd, b""):
                    self._say(fd, rest)

    def phase(self, name: str) -> None:
        """Show a phase in which there are no ranks to tell of it."""
        with self._lock:
            self._output.progress.phase(0, 0, name)

    def end_bar(self) -> None:
        """See `RunOutput.end_bar`."""
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
        """Hand on what has come, if anything."""
        anything = False
        for fd in (self._progress, self._of_stdout, self._of_stderr):
            if data := _read(fd):
                anything = True
                *lines, rest = (self._unread.get(fd, b"") + data).split(b"\n")
                for line in lines:
                    self._say(fd, line)
                if len(rest) > _LONGEST_LINE:
                    self._say(fd, rest)
                    rest = b""
                # Of a line that is written over and over (a download's bar) only the newest state counts.
                states = rest.split(b"\r")[-2:]
                if len(states) == 2:
                    self._output.note(_text(states[1] or states[0]))
                self._unread[fd] = b"\r".join(states)
        return anything

    def _say(self, fd: int, line: bytes) -> None:
        if fd == self._progress:
            with suppress(ValueError):  # code of the user's may write where it likes, and must not stop this thread
                deliver(line, self._output.progress)
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
