"""Applies `reward.on_error` and `reward.failed_score` to samples on which a function failed or timed out."""

import logging
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rlhf.config.schema.reward import RewardConfig
from rlhf.errors import UserError
from rlhf.reward.scores import RewardItem, Score

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Timeouts:
    """Samples on which one function took longer than `reward.timeout_s`."""

    function: str
    timeout_s: float
    failed_score: float
    count: int
    example: str
    """The first sample, as text for users."""

    def __str__(self) -> str:
        return (
            f"{self.function} took longer than reward.timeout_s={self.timeout_s:g} on {self.count} samples, which "
            f"score {self.failed_score:g}. The first: {self.example}"
        )


def merge_timeouts(parts: Iterable[Timeouts]) -> list[Timeouts]:
    """Merge to one entry per function, with the sum of the counts and the first example."""
    merged: dict[str, Timeouts] = {}
    for part in parts:
        first = merged.get(part.function)
        merged[part.function] = part if first is None else replace(first, count=first.count + part.count)
    return list(merged.values())


class FailurePolicy:
    """Scores the failed and late samples of one function, or ends the run at a failed sample. Thread-safe."""

    def __init__(self, function: str, config: RewardConfig):
        self._function = function
        self._config = config
        self._logged = False
        self._timeouts: list[Timeouts] = []
        self.stops = config.on_error == "stop"
        self.last = ""
        """The last failure or timeout, as text for users; empty without one."""
        self._lock = threading.Lock()

    def failed(self, error: Exception, *, forgive: bool = False) -> Score:
        """Return the score of a sample that failed with `error`; log only the first error.

        If `reward.on_error=stop`, raise UserError with the error's text, unless `forgive` is set. Forgive errors that a
        response can cause: the same response would end the run again after every restart.
        """
        if self._config.on_error == "stop" and not forgive:
            raise UserError(
                f"reward.functions={self._function} failed on a sample, and reward.on_error=stop ends the run. "
                f"Correct the function, or set reward.on_error=score, which gives such samples "
                f"reward.failed_score={self._config.failed_score:g} and counts them.\n{error}"
            ) from error
        with self._lock:
            first, self._logged = not self._logged, True
            self.last = f"{self._function} failed: {error}"
        if first:
            log.warning(
                "reward.functions: %s failed on a sample, which scores reward.failed_score=%g. Further failures are "
                "only counted, in reward/failures.\n%s",
                self._function,
                self._config.failed_score,
                error,
            )
        return Score(self._config.failed_score, failed=True)

    def timed_out(self, items: Sequence[RewardItem]) -> list[Score]:
        """Return the scores of samples that exceeded `reward.timeout_s`, and record them for `pop_timeouts`."""
        limits = self._config.timeout_s, self._config.failed_score
        with self._lock:
            self._timeouts.append(Timeouts(self._function, *limits, len(items), str(items[0])))
            self.last = f"{self._function} took longer than reward.timeout_s={limits[0]:g} on: {items[-1]}"
        return [Score(self._config.failed_score, timed_out=True) for _ in items]

    def pop_timeouts(self) -> list[Timeouts]:
        """Return the samples that timed out since the last call: one entry, or none."""
        with self._lock:
            timeouts, self._timeouts = self._timeouts, []
        return merge_timeouts(timeouts)
