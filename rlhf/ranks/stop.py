"""A request to leave, in the supervisor and in the ranks: schedulers send SIGTERM or SIGUSR1, people press Ctrl-C.

The rule, the same for every process of a run: SIGTERM, SIGUSR1, SIGINT and SIGHUP mean "save at the next safe point and
leave with EXIT_REQUEUE". It doesn't matter whether a scheduler signals the supervisor, the ranks or all of them. Only
SIGKILL means "die now", and it is the only signal with which the supervisor ends a rank.
"""

import os
import select
import signal
from contextlib import suppress
from types import FrameType

from rlhf.errors import EXIT_REQUEUE

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
IDLE = "while no rank was training"
"""What follows a signal's name where there was nothing to save, whichever process says it."""


def leave_while_idle() -> None:
    """From now on a request to stop ends this process at once, with one line and EXIT_REQUEUE: for the time in which no
    ranks run, before, between and after them. Main thread only."""
    for number in STOP_SIGNALS:
        # An ignored signal stays ignored, and one that somebody handles is theirs.
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    # Over the terminal's own ^C. No stream of Python's: the signal may have come in the middle of a write.
    start = "\r\x1b[K" if os.isatty(2) else ""
    line = f"{start}{signal.Signals(number).name} {IDLE}. The same command starts it again.\n"
    with suppress(OSError):  # a terminal that has hung up
        waits = select.poll()
        waits.register(2, select.POLLOUT)
        if waits.poll(0):  # not a pipe that is full
            os.write(2, line.encode())
    os._exit(EXIT_REQUEUE)


class PreemptionFlag:
    """The rank's side: installs the handlers (main thread only); `requested` becomes and stays true.

    One rank may see the request a step earlier than another, so the loop all-reduces the flag and all ranks leave
    together.
    """

    def __init__(self) -> None:
        self.requested = False
        for number in STOP_SIGNALS:
            # An ignored signal stays ignored: that is how nohup and background jobs of a shell ask for it.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
