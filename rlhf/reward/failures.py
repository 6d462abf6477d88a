"""Policy for samples on which a function failed: `reward.on_error` and `reward.failed_score`."""

import logging
import threading

from rlhf.config.reward import RewardConfig
from rlhf.reward.scores import Score

log = logging.getLogger(__name__)


class FailurePolicy:
    """The policy for one function. May be asked from several threads."""

    def __init__(self, function: str, config: RewardConfig):
        self._function = function
        self._config = config
        self._told = False
        self._lock = threading.Lock()

    def failed(self, error: Exception, *, forgive: bool = False) -> Score:
        """The score after `error`, told in the log once; with `on_error=stop` raises the error, unless `forgive`."""
        if self._config.on_error == "stop" and not forgive:
            raise error
        with self._lock:
            first, self._told = not self._told, True
        if first:
            log.warning(
                "reward.functions: %s failed on a sample, which scores reward.failed_score=%g. Further failures are "
                "only counted, in reward/failures.\n%s",
                self._function,
                self._config.failed_score,
                error,
            )
        return Score(self._config.failed_score, failed=True)

    def timed_out(self) -> Score:
        """The score on a sample that took longer than `reward.timeout_s`."""
        log.warning(
            "reward.functions: %s took longer than reward.timeout_s=%g on a sample, which scores %g.",
            self._function,
            self._config.timeout_s,
            self._config.failed_score,
        )
        return Score(self._config.failed_score, timed_out=True)
