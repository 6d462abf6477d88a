"""Receives, in the supervisor, requests to stop the run: a signal (`rlhf.ranks.stop`) or a failed callback."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Self

from rlhf.ranks.stop import STOP_SIGNALS

# GNU timeout signals both the process and its group. A repetition within this time is the same request.
_REPEAT_S = 1.0
_received: list[int] = []
"""Numbers of the signals that this process has received as requests to stop."""


def signals_received() -> int:
    """Return how many stop signals this process has received while a run trained.

    A run whose last step is under way finishes in spite of a signal, so its exit code does not show that a signal came.
    """
    return len(_received)


class StopRequest:
    """Handles stop signals while entered: the first sets `signal_name`, a second SIGTERM or SIGINT sets `kill`.

    Outside the main thread, where Python handles no signals, only `request` requests a stop.
    """

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self.at = 0.0
        """Time of the request on the monotonic clock, in seconds."""
        self.kill = False
        self._urgent_at: float | None = None
        self._interrupts = False
        self._previous: dict[int, signal.Handlers | object] = {}

    def __enter__(self) -> Self:
        in_main_thread = threading.current_thread() is threading.main_thread()
        for number in STOP_SIGNALS if in_main_thread else ():
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def request(self, reason: str) -> None:
        """Request a stop without a signal. `reason` replaces the signal's name in messages."""
        if self.signal_name is None:
            self.signal_name, self.at = reason, time.monotonic()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        _received.append(number)
        self.request(signal.Signals(number).name)
        # SLURM warns with SIGUSR1 and later sends one SIGTERM. Both are one request to save and leave.
        if number in (signal.SIGTERM, signal.SIGINT):
            if self._urgent_at is None:
                self._urgent_at = now
            elif now - self._urgent_at >= _REPEAT_S:
                self.kill = True
                if self._interrupts:
                    raise KeyboardInterrupt

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Raise KeyboardInterrupt in the body when `kill` is set: the user's code may never return."""
        self._interrupts = True
        try:
            yield
        finally:
            self._interrupts = False

    def wait(self, seconds: float) -> None:
        """Sleep for `seconds`, or until a stop is requested."""
        end = time.monotonic() + seconds
        while self.signal_name is None and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, 0.1))
