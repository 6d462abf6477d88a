"""Progress of a rank on its way to the supervisor, which shows it: messages over a pipe, a line of JSON each."""

import errno
import json
import os
import select
from collections.abc import Mapping
from typing import Any

from rlhf.printable import printable

PROGRESS_FD = "RLHF_PROGRESS_FD"
"""Names the pipe's end in a rank; without it (torchrun, a debugger) there is nobody to tell."""
_LOST = (errno.EAGAIN, errno.EPIPE, errno.EBADF)
_TOO_MANY = 1 << 63
"""Nothing that is counted comes to it, and greater integers have no place among floats."""


class ShowsProgress:
    """Interface of what shows the progress of a run to people; by itself it shows it to nobody."""

    def start(self, step: int, total: int) -> None:
        """The run begins at `step` finished steps, of `total`: 0, the resume step, or one that it goes back to."""

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is finished; step 0 is the evaluation before training."""

    def phase(self, rank: int, step: int, name: str, done: int, total: int) -> None:
        """A rank has `done` of `total` parts of a phase of the step under way; with a `total` of 0 they are not
        counted."""


class ProgressPipe(ShowsProgress):
    """`ShowsProgress` in the process at the other end of `fd`. It never waits: what the pipe has no room for is lost,
    and so is everything once nobody reads."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        os.set_blocking(fd, False)

    @classmethod
    def of_environment(cls) -> ShowsProgress:
        """The one that PROGRESS_FD names."""
        fd = os.environ.get(PROGRESS_FD)
        return ShowsProgress() if fd is None else cls(int(fd))

    def start(self, step: int, total: int) -> None:
        """See `ShowsProgress`."""
        self._send("start", step, total)

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `ShowsProgress`."""
        self._send("update", step, dict(metrics))

    def phase(self, rank: int, step: int, name: str, done: int, total: int) -> None:
        """See `ShowsProgress`."""
        self._send("phase", rank, step, name, done, total)

    def _send(self, *message: object) -> None:
        line = json.dumps(message).encode() + b"\n"
        if len(line) > select.PIPE_BUF:  # only shorter ones are never mixed with another rank's
            return
        try:
            os.write(self._fd, line)
        except OSError as error:
            if error.errno not in _LOST:
                raise


def deliver(line: bytes, to: ShowsProgress) -> None:
    """Show a line that came through a pipe; ValueError for one that no `ProgressPipe` wrote."""
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
            raise ValueError("no message about progress")


def _are_counts(*values: Any) -> bool:
    return all(type(value) is int and 0 <= value < _TOO_MANY for value in values)


def _is_figure(value: Any) -> bool:
    return type(value) is float or (type(value) is int and -_TOO_MANY < value < _TOO_MANY)
