"""Rejects batches whose metrics are out of bounds: skips the batch, rolls back or ends the run (`guards.action`)."""

import logging
import math
from dataclasses import dataclass
from typing import Any, Literal

from rlhf.config.schema.guards import GuardsConfig
from rlhf.errors import UserError

logger = logging.getLogger(__name__)

Decision = Literal["train", "skip", "rollback"]
# Weight of the newest batch in the moving average of rewards.
NEWEST_WEIGHT = 0.1
_BOUNDS = {"loss": "max_loss", "kl": "max_kl", "ref_kl": "max_kl", "drop": "max_reward_drop"}


@dataclass(frozen=True)
class Event:
    """A rejected batch: its step, and its first metric that was out of bounds."""

    step: int
    who: str
    """`actor`, `critic` or `reward`."""
    metric: str
    value: float
    bound: float | None
    """None if `value` is not finite."""

    def __str__(self) -> str:
        wrong = "is not finite" if self.bound is None else f"is beyond guards.{_BOUNDS[self.metric]}={self.bound:g}"
        return f"step {self.step}: {self.who} {self.metric} {self.value:.6g} {wrong}"


class Guards:
    """Checks each batch by metrics that are equal on all ranks, so that all ranks decide the same.

    For each batch, call `begin`, then `allows` before each optimizer step, then `settle`. If `settle` returns
    `rollback`, call `remember`, load the newest checkpoint (which calls `load_state_dict`), and call `recall`.

    A crash between a rollback and the next save loses the memory of the rollback, but does not change the run.
    Decisions depend only on the batch and the checkpoint's state. So the repeated step is rejected again, and draws the
    same later prompts. A rollback changes the trajectory only by these prompts, whichever checkpoint was loaded: the
    checkpoint restores the reward average, and the metrics of a step count only the events up to that step.

    The number of rollbacks is bounded. Only an accepted step after all rolled-back steps resets the count of
    rejections in a row. So each step causes at most `max_events` rollbacks, even if repeated steps are accepted. A
    crash may lower the count, but the supervisor limits the restarts after crashes.

    Args:
        config: the bounds, and the action beyond them.
        quiet: log nothing, because another rank logs.
        own_loss: the setting that names the user's policy loss, with its value; None for a loss of the trainer.
    """

    def __init__(self, config: GuardsConfig, *, quiet: bool = False, own_loss: str | None = None) -> None:
        self._config, self._quiet, self._own_loss = config, quiet, own_loss
        self.rolls_back = config.action == "rollback"
        self.step, self._reward = 0, 0.0
        self.rejected: Event | None = None
        """The event that rejected the current batch; None if it is not rejected."""
        self._average: float | None = None
        self._skips = 0
        # Rejected step -> number of its rollbacks, and position in the stream from which the step draws prompts.
        self._rollbacks: dict[int, tuple[int, int]] = {}
        self._row: list[Event] = []

    def begin(self, step: int, reward_mean: float) -> None:
        """Begin a batch. Reject it if its mean reward is not finite, or too far below the moving average."""
        self.step, self._reward, self.rejected = step, reward_mean, None
        drop = 0.0 if self._average is None else self._average - reward_mean
        if not math.isfinite(reward_mean):
            self.rejected = Event(step, "reward", "mean", reward_mean, None)
        elif self._config.max_reward_drop is not None and drop > self._config.max_reward_drop:
            self.rejected = Event(step, "reward", "drop", drop, self._config.max_reward_drop)

    def allows(self, who: str, **metrics: float) -> bool:
        """Return whether the batch is still accepted. Reject it if a metric of the mini-batch is out of bounds.

        Args:
            who: `actor` or `critic`.
            metrics: must be finite. `max_loss` bounds the absolute value of `loss`; `max_kl` bounds `kl`
                and `ref_kl`, means per token.
        """
        for name, value in metrics.items():
            if self.rejected is not None:
                break
            bound = getattr(self._config, _BOUNDS[name]) if name in _BOUNDS else None
            if not math.isfinite(value):
                self.rejected = Event(self.step, who, name, value, None)
            elif bound is not None and (abs(value) if name == "loss" else value) > bound:
                self.rejected = Event(self.step, who, name, value, bound)
        return self.rejected is None

    def settle(self, step: int, *, last: bool = False) -> Decision:
        """Return the decision on the batch of `step` after its updates. `last` is whether it is the run's last step.

        Raises:
            UserError: `action` is `stop` and the batch is rejected; more than `max_events` batches in a row are
                rejected; or `action` is `skip`, the step is the last, and metrics that are not finite were the reason
                to reject every batch of the run.
        """
        if self.rejected is None:
            old = self._reward if self._average is None else self._average
            self._average = old + NEWEST_WEIGHT * (self._reward - old)
            if step > max(self._rollbacks, default=0):
                self._row.clear()
            return "train"
        self._row.append(self.rejected)
        action = self._config.action
        nothing = last and self._average is None and all(event.bound is None for event in self._row)
        if action == "stop" or len(self._row) > self._config.max_events or (nothing and action == "skip"):
            raise UserError(self._evidence())
        if not self._quiet:
            logger.warning(
                "A batch is rejected at %s (guards.action=%s; %d in a row, guards.max_events=%d).",
                self.rejected,
                action,
                len(self._row),
                self._config.max_events,
            )
        if action == "skip":
            self._skips += 1
            return "skip"
        return "rollback"

    def metrics(self) -> dict[str, float]:
        """Return the number of skips and rollbacks up to this step, and whether this batch is rejected."""
        return {
            "guards/skips": self._skips,
            "guards/rollbacks": sum(times for step, (times, _) in self._rollbacks.items() if step <= self.step),
            "guards/refused": int(self.rejected is not None),
        }

    def remember(self, position: int) -> dict[str, Any]:
        """Count the rollback of the rejected step, and return the state that `recall` restores after the rollback.

        Args:
            position: position in the stream after the rejected step's prompts, from which the repeated step draws.
        """
        times, _ = self._rollbacks.get(self.step, (0, 0))
        self._rollbacks[self.step] = (times + 1, position)
        state = self.state_dict()
        return {name: state[name] for name in ("rollbacks", "row")}

    def recall(self, memory: dict[str, Any]) -> None:
        """Restore the state that `remember` returned. Call this after the checkpoint is loaded."""
        self.load_state_dict(self.state_dict() | memory)

    def skip_for(self, step: int) -> int | None:
        """Return the first position in the stream from which `step` may draw; None if `step` was not rolled back."""
        return self._rollbacks[step][1] if step in self._rollbacks else None

    def state_dict(self) -> dict[str, Any]:
        """Return the state on which later decisions depend, as JSON values."""
        return {
            "reward_average": self._average,
            "skips": self._skips,
            "rollbacks": [[step, *entry] for step, entry in sorted(self._rollbacks.items())],
            # Store text, because JSON has no NaN, and two NaN are not equal in a comparison of states.
            "row": [[event.step, event.who, event.metric, repr(event.value), event.bound] for event in self._row],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rejected = None
        average = state["reward_average"]
        self._average, self._skips = None if average is None else float(average), int(state["skips"])
        self._rollbacks = {int(step): (int(times), int(position)) for step, times, position in state["rollbacks"]}
        self._row = [Event(step, who, metric, float(value), bound) for step, who, metric, value, bound in state["row"]]

    def _evidence(self) -> str:
        row, config = self._row, self._config
        if config.action == "stop":
            rejected, row = "a batch (guards.action=stop)", row[-1:]
        elif len(row) <= config.max_events:
            rejected = "every batch of the run"
        else:
            rejected = f"{len(row)} batches in a row, more than guards.max_events={config.max_events}"
        events = "".join(f"\n  {event}" for event in row)
        rates = sorted({"critic.optim.lr" if event.who == "critic" else "actor.optim.lr" for event in row})
        bounds = sorted({f"guards.{_BOUNDS[event.metric]}" for event in row if event.bound is not None})
        raise_bounds = f"raise {' and '.join(bounds)}; " if bounds else ""
        fix_loss = ""
        if self._own_loss and any(event.who == "actor" and event.bound is None for event in row):
            fix_loss = f"Check that the losses of {self._own_loss} are finite; "
        lower = f"{'lower' if fix_loss else 'Lower'} {' and '.join(rates)}"
        return (
            f"The guards rejected {rejected}:{events}\n"
            f"{fix_loss}{lower}; check the prompts and rewards of these steps; {raise_bounds}"
            "set trainer.allow_config_change=true to continue from the newest checkpoint with other settings."
        )
