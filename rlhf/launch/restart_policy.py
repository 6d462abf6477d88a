"""Restart policy: a state machine, without processes or clocks, that restarts after a crash or gives up."""

from dataclasses import dataclass

from rlhf.config.schema.trainer import TrainerConfig


@dataclass(frozen=True)
class Restart:
    """Start the ranks again: the `number`th restart of the budget, after `wait_s` seconds."""

    number: int
    wait_s: float


@dataclass(frozen=True)
class GiveUp:
    """End the run; `reason` names the setting that said so."""

    reason: str


class RestartPolicy:
    """Back-off that grows tenfold, a budget of restarts that progress renews, and an end to crash loops at one step."""

    def __init__(self, settings: TrainerConfig) -> None:
        self._settings = settings
        self._restarts = 0
        self._furthest = -1
        self._last = -1
        self._failures_in_a_row = 0

    def crashed(self, step: int | None) -> Restart | GiveUp:
        """Decide after a crash at `step`; None when no rank got as far as naming one."""
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
