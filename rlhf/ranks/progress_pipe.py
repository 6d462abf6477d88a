"""Sends a rank's progress to the supervisor, as lines of JSON over a pipe."""

import errno
import json
import os
import select
from collections.abc import Mapping
from typing import Any

from rlhf.printable import printable

PROGRESS_FD = "RLHF_PROGRESS_FD"
"""Variable with the file descriptor of the pipe in a rank. Without it (torchrun, a debugger), nobody reads progress."""
_LOST = (errno.EAGAIN, errno.EPIPE, errno.EBADF)
_TOO_MANY = 1 << 63
"""A message with a count of this size or more is invalid. Displays can convert each smaller count to a float."""


class ProgressDisplay:
    """Interface of displays of a run's progress. This class shows nothing."""

    def start(self, step: int, total: int) -> None:
        """Show that `step` of `total` steps are finished: at the start, after a resume or after a rollback."""

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a finished step; step 0 is the evaluation before training."""

    def phase(self, rank: int, step: int, name: str, done: int, total: int) -> None:
        """Show that a rank has finished `done` of `total` parts of a phase. If `total` is 0, show no counts."""


class ProgressPipe(ProgressDisplay):
    """Sends progress to the process at the other end of `fd`. Never waits: a full or closed pipe loses messages."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        os.set_blocking(fd, False)

    @classmethod
    def from_environment(cls) -> ProgressDisplay:
        """Return the pipe of PROGRESS_FD, or a display that shows nothing."""
        fd = os.environ.get(PROGRESS_FD)
        return ProgressDisplay() if fd is None else cls(int(fd))

    def start(self, step: int, total: int) -> None:
        self._send("start", step, total)

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        self._send("update", step, dict(metrics))

    def phase(self, rank: int, step: int, name: str, done: int, total: int) -> None:
        self._send("phase", rank, step, name, done, total)

    def _send(self, *message: object) -> None:
        line = json.dumps(message).encode() + b"\n"
        if len(line) > select.PIPE_BUF:  # the kernel may mix longer lines with lines of another rank
            return
        try:
            os.write(self._fd, line)
        except OSError as error:
            if error.errno not in _LOST:
                raise


def dispatch_message(line: bytes, to: ProgressDisplay) -> None:
    """Pass a `line` from a pipe on to the display `to`. Raise ValueError if no `ProgressPipe` wrote the line."""
    try:
        message = json.loads(line)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    match message:
        case ["start", step, total] if _are_counts(step, total):
            to.start(step, total)
        case ["update", step, dict(metrics)] if _are_counts(step) and all(map(_is_figure, metrics.values())):
            to.update(step, metrics)
        case ["phase", rank, step, str(name), done, total] if _are_counts(rank, step, done, total):
            to.phase(rank, step, printable(name), done, total)
        case _:
            raise ValueError("not a progress message")


def _are_counts(*values: Any) -> bool:
    return all(type(value) is int and 0 <= value < _TOO_MANY for value in values)


def _is_figure(value: Any) -> bool:
    return type(value) is float or (type(value) is int and -_TOO_MANY < value < _TOO_MANY)
