"""A request to leave, in the supervisor and in the ranks: schedulers send SIGTERM or SIGUSR1, people press Ctrl-C.

The rule, the same for every process of a run: SIGTERM, SIGUSR1, SIGINT and SIGHUP mean "save at the next safe point and
leave with EXIT_REQUEUE". It doesn't matter whether a scheduler signals the supervisor, the ranks or all of them. Only
SIGKILL means "die now", and it is the only signal with which the supervisor ends a rank.
"""

import os
import signal
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
EXIT_INTERRUPTED = 128 + signal.SIGINT
"""As shells say it of a command that Ctrl-C has ended."""


def end_interrupted(number: int, frame: FrameType | None) -> None:
    """Handler of SIGINT for the time before there is anything to save: ends the process with one line and
    EXIT_INTERRUPTED."""
    # Over the terminal's own ^C. No stream of Python's: the signal may have come in the middle of a write.
    start = b"\r\x1b[K" if os.isatty(2) else b""
    os.write(2, start + b"Interrupted before the training began.\n")
    os._exit(EXIT_INTERRUPTED)


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
