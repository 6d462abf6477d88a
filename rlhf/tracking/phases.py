"""Shows users a rank's current phase, derived from announced events and reports."""

import threading
import time

from rlhf.events import GENERATING, REWARD
from rlhf.ranks.progress_pipe import ProgressDisplay
from rlhf.ranks.status import SCORED, StatusWriter

NAMES = {
    "step.begin": GENERATING,
    "rollout.before": GENERATING,
    "rollout.begin": GENERATING,
    "rollout.push": "weights to the servers",
    "rollout.after": REWARD,
    "update.before": "update",
    "evaluation.before": "evaluation",
    "commit.snapshot": "saving",
    "commit.wait": "saving",
    "memory.snapshot": "saving",
    "memory.wait": "saving",
    "rollback.before": "rolling back",
    "end.before": "finishing",
}
"""The phase that each event of the loop begins."""
INTERVAL_S = 0.1


class Phases:
    """Sends the phases of the thread that creates this object to `shown` and to the rank's status file.

    Other threads only update a phase's counts.
    """

    def __init__(self, shown: ProgressDisplay, rank: int, status: StatusWriter) -> None:
        self._shown, self._rank, self._status = shown, rank, status
        self._thread = threading.get_ident()
        self._step, self._name, self._done, self._total = 0, "", 0, 0
        self._evaluation = ""
        self._shown_at = 0.0

    def event(self, step: int, event: str) -> None:
        """Handle an event of `rlhf.events` in `step`."""
        if event == SCORED and self._name == REWARD:
            self.report(REWARD, min(self._done + 1, self._total), self._total)
        if threading.get_ident() != self._thread:
            return
        if event == "evaluation.after":
            self._evaluation = ""
        name = NAMES.get(event)
        if name is None or self._evaluation:
            return
        self._step = step
        if event == "evaluation.before":
            self._evaluation = "evaluation" if self._step else "first evaluation"
            name = ""
        self._enter(name)

    def report(self, name: str, done: int = 0, total: int = 0) -> None:
        """Handle a report of `rlhf.events`."""
        if name != self._name:
            if threading.get_ident() != self._thread:
                return
            self._enter(name, done, total)
            return
        self._done, self._total = done, total
        if done == total or time.monotonic() - self._shown_at >= INTERVAL_S:
            self._show()

    def _enter(self, name: str, done: int = 0, total: int = 0) -> None:
        self._name, self._done, self._total = name, done, total
        self._show()

    def _show(self) -> None:
        self._shown_at = time.monotonic()
        name = ": ".join(part for part in (self._evaluation, self._name) if part)
        self._status.phase(name, self._done, self._total)
        self._shown.phase(self._rank, self._step, name, self._done, self._total)
