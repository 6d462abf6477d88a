"""Decides when ranks that run on fewer machines than `trainer.nnodes` save and restart on more. Imports no Ray."""

import logging
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

WAIT_S = 60.0
"""Seconds for which a machine must have room before the ranks leave for it."""
LONGEST_WAIT_S = 3600.0
LASTING_S = 3600.0
"""A growth that ends within this time doubles the wait, so that a machine that comes and goes costs few restarts."""
_LOOK_S = 10.0


class Growth:
    """Looks for room for another machine while an attempt runs on fewer than `most` machines.

    Args:
        most: the largest number of machines, `trainer.nnodes`.
        has_room: returns whether a machine has room for one more worker now.
        clock: returns seconds.
    """

    def __init__(self, most: int, has_room: Callable[[], bool], clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._has_room, self._clock = most, has_room, clock
        self._wait_s = WAIT_S
        self._attempt = ""
        self._grows = False
        self._grew_at: float | None = None
        self._grew_from = 0
        self._looked_at = 0.0
        self._free_since: float | None = None

    def look(self, attempt: str, machines: int) -> bool:
        """Return whether the ranks of `attempt`, which run on `machines` machines, must leave for a larger attempt."""
        now = self._clock()
        if self._grew_at is not None and machines > self._grew_from and now - self._grew_at >= LASTING_S:
            self._wait_s, self._grew_at = WAIT_S, None
        if machines >= self._most:
            return False
        if attempt != self._attempt:
            self._begin(attempt, machines, now)
        if not self._grows and now - self._looked_at >= _LOOK_S:
            self._looked_at = now
            if not self._has_room():
                self._free_since = None
            elif self._free_since is None:
                self._free_since = now
            elif now - self._free_since >= self._wait_s:
                log.info("A machine has room for more ranks: the ranks save, and Ray restarts them on more machines.")
                self._grows, self._grew_at, self._grew_from = True, now, machines
        return self._grows

    def _begin(self, attempt: str, machines: int, now: float) -> None:
        self._attempt, self._grows, self._looked_at, self._free_since = attempt, False, now, None
        if self._grew_at is not None and machines <= self._grew_from:  # the larger attempt did not start, or has ended
            self._wait_s, self._grew_at = min(2 * self._wait_s, LONGEST_WAIT_S), None
