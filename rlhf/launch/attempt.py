"""Waits until all ranks of one attempt have ended, and kills ranks that would wait for failed peers."""

import logging
import time
from collections.abc import Collection

from rlhf.errors import EXIT_DONE, EXIT_REQUEUE, EXIT_USER_ERROR
from rlhf.launch.callbacks import Callbacks
from rlhf.launch.evidence import AttemptResult, Hang, furthest_step
from rlhf.launch.hangs import HangDetector
from rlhf.launch.interface import RankExit, Ranks
from rlhf.launch.stop_request import StopRequest

# Time for the peers of a dead rank to notice its death and log errors. In an NCCL collective, peers never notice.
PEER_GRACE_S = 5.0
# A process that survives SIGKILL is stuck in the kernel (a wedged GPU or disk). The attempt then ends without it.
_KILL_TIMEOUT_S = 10.0
_LOOK_S = 0.1

log = logging.getLogger(__name__)


class Attempt:
    """Waits for the ranks, and kills the remaining ranks after a failure.

    After a crash or a user error of one rank, its peers have `PEER_GRACE_S` seconds to end. After a stop request, or
    after a rank ended with EXIT_REQUEUE, the ranks have `grace_s` seconds. The attempt then kills the ranks that are
    alive. It kills them at once after a second signal, and in a hang that `detector` finds. It also kills them at once
    if a stop is requested before any rank has reached a step, because there is nothing to save.
    """

    def __init__(
        self,
        ranks: Ranks,
        nproc: int,
        stop: StopRequest,
        grace_s: float,
        detector: HangDetector | None,
        callbacks: Callbacks,
    ) -> None:
        self._ranks, self._nproc = ranks, nproc
        self._stop, self._grace_s, self._detector, self._callbacks = stop, grace_s, detector, callbacks
        self._deadline = float("inf")
        self._stop_requested, self._idle = False, False
        self._first_failure_at: float | None = None
        self._killed_at: float | None = None
        self._exits: dict[int, RankExit] = {}
        self._first: list[int] = []
        self._killed: frozenset[int] = frozenset()
        self._hang: Hang | None = None

    def run(self) -> AttemptResult:
        """Return the result when every rank has ended, or when SIGKILL does not end the remaining ranks."""
        if self._detector is not None:
            self._detector.start(range(self._nproc))
        while True:
            ended, now = self._ranks.ended(_LOOK_S), time.monotonic()
            for rank, end in ended.items():
                self._note(rank, end, now)
            self._callbacks.look(self._stop)
            alive = set(range(self._nproc)) - self._exits.keys()
            if not alive or (self._killed_at is not None and now > self._killed_at + _KILL_TIMEOUT_S):
                return AttemptResult(self._exits, tuple(sorted(self._first)), self._killed, self._hang, self._idle)
            self._stop_ranks_if_due(alive, now)

    def _note(self, rank: int, end: RankExit, now: float) -> None:
        self._exits[rank], code = end, end.code
        if code == EXIT_DONE or end.died_with:
            return
        if self._first_failure_at is None:
            self._first_failure_at = now
        if now < self._first_failure_at + _LOOK_S:
            self._first.append(rank)
        self._deadline = min(self._deadline, now + (self._grace_s if code == EXIT_REQUEUE else PEER_GRACE_S))
        if code not in (EXIT_REQUEUE, EXIT_USER_ERROR):
            self._ranks.kill([rank])  # the rank is dead; this kills processes that it started, such as reward processes

    def _stop_ranks_if_due(self, alive: Collection[int], now: float) -> None:
        if self._stop.signal_name and not self._stop_requested:
            self._stop_requested = True
            self._idle = furthest_step(self._ranks.statuses()) is None
            if not self._idle:
                self._request_stop(alive)
        if self._killed_at is not None:
            return
        if self._detector is not None:
            self._hang = self._detector.look(self._ranks, alive)
        if self._hang is not None or self._stop.kill or self._idle or now >= self._deadline:
            self._killed_at, self._killed = now, frozenset(alive)
            self._ranks.kill(alive)

    def _request_stop(self, alive: Collection[int]) -> None:
        self._deadline = min(self._deadline, self._stop.at + self._grace_s)
        self._ranks.request_stop(alive)
        log.info(
            "%s: the ranks save at the next safe point and leave, within %g s (trainer.preempt_grace_s). "
            "A second SIGTERM or Ctrl-C kills them at once.",
            self._stop.signal_name,
            self._grace_s,
        )
