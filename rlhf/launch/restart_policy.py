"""Decides after a crash whether to restart or to give up. Uses no processes and no clock."""

from dataclasses import dataclass

from rlhf.config.schema.trainer import TrainerConfig


@dataclass(frozen=True)
class Restart:
    """Decision to restart the ranks after `wait_s` seconds. `number` counts the restarts since the last reset."""

    number: int
    wait_s: float


@dataclass(frozen=True)
class GiveUp:
    """Decision to end the run. `reason` names the setting that limits the restarts."""

    reason: str


class RestartPolicy:
    """Multiplies the wait by ten with each restart, up to `trainer.restart_backoff_max_s`, and limits the restarts.

    A crash at a later step than all earlier crashes renews the budget `trainer.max_restarts`. After
    `trainer.max_failures_per_step` crashes in a row at the same step, the run ends.
    """

    def __init__(self, settings: TrainerConfig) -> None:
        self._settings = settings
        self._restarts = 0
        self._furthest = -1
        self._last = -1
        self._failures_in_a_row = 0
        self._cause, self._same_cause = "", 0

    def is_second(self, cause: str) -> bool:
        """Return whether this is the second crash in a row with this `cause`. Call this once per crash."""
        self._same_cause = self._same_cause + 1 if cause == self._cause else 1
        self._cause = cause
        return self._same_cause == 2

    def crashed(self, step: int | None) -> Restart | GiveUp:
        """Return the decision after a crash at `step`, or before the first step if `step` is None."""
        s = self._settings
        at = -1 if step is None else step
        self._failures_in_a_row = self._failures_in_a_row + 1 if at == self._last else 1
        if at > self._furthest:
            self._restarts = 0
        self._last = at
        self._furthest = max(self._furthest, at)
        if self._failures_in_a_row >= s.max_failures_per_step:
            where = "before the first step" if step is None else f"at step {step}"
            return GiveUp(
                f"crashes in a row {where}: {self._failures_in_a_row} "
                f"(trainer.max_failures_per_step={s.max_failures_per_step})"
            )
        if self._restarts >= s.max_restarts:
            return GiveUp(f"{self._restarts} restarts are used up (trainer.max_restarts={s.max_restarts})")
        # The exponent is bounded because a float overflows at 10**309.
        wait_s = min(s.restart_backoff_s * 10.0 ** min(self._restarts, 64), s.restart_backoff_max_s)
        self._restarts += 1
        return Restart(self._restarts, wait_s)
