"""Handles requests to stop, in the supervisor and in the ranks: schedulers send SIGTERM or SIGUSR1, users press Ctrl-C.

In every process of a run, SIGTERM, SIGUSR1, SIGINT and SIGHUP mean "save at the next safe point and leave with
EXIT_REQUEUE", whether a scheduler signals the supervisor, the ranks or all of them. The supervisor kills ranks with
SIGKILL only.
"""

import os
import select
import signal
from contextlib import suppress
from types import FrameType

from rlhf.errors import EXIT_REQUEUE

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
IDLE = "while no rank was training."
"""Follows a signal's name in a message if there was nothing to save."""
RERUN_HINT = "The same command starts the run again."
"""Ends a message if no checkpoint is known."""


def exit_on_stop_signal() -> None:
    """Make requests to stop end this process at once, with one line and EXIT_REQUEUE. Main thread only.

    This is for the time before, between and after attempts, when no ranks run.
    """
    for number in STOP_SIGNALS:
        # Do not change ignored signals, or handlers that other code has set.
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    # Overwrite the terminal's own ^C. Do not use Python's streams: the signal may have interrupted a write.
    start = "\r\x1b[K" if os.isatty(2) else ""
    line = f"{start}{signal.Signals(number).name} {IDLE} {RERUN_HINT}\n"
    with suppress(OSError):  # the terminal may have hung up
        waits = select.poll()
        waits.register(2, select.POLLOUT)
        if waits.poll(0):  # a full pipe would block
            os.write(2, line.encode())
    os._exit(EXIT_REQUEUE)


class PreemptionFlag:
    """Sets `requested` in a rank when a stop is requested. Main thread only.

    A rank may see the request a step before its peers, so the loop all-reduces the flag and all ranks leave together.
    """

    def __init__(self) -> None:
        self.requested = False
        for number in STOP_SIGNALS:
            # nohup and background jobs of a shell rely on ignored signals.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
