"""Guards: end the update of a batch before it does harm, and say whether the run goes on, goes back or ends."""

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
    """A refused batch: its step, and the first figure that was out of bounds."""

    step: int
    who: str
    """`actor`, `critic` or `reward`."""
    figure: str
    value: float
    bound: float | None
    """None: the value is not finite."""

    def __str__(self) -> str:
        wrong = "is not finite" if self.bound is None else f"is beyond guards.{_BOUNDS[self.figure]}={self.bound:g}"
        return f"step {self.step}: {self.who} {self.figure} {self.value:.6g} {wrong}"


class Guards:
    """Judges each batch by figures that are equal on all ranks, and so decides the same on each of them.

    The order of calls for a batch: `begin`, `allows` before each optimizer step, `settle`. When the decision is
    `rollback`: `remember`, restore the newest checkpoint (which calls `load_state_dict`), `recall`.

    A crash between a roll-back and the next save takes the memory of it, and changes nothing: decisions follow from the
    batch and from the state of the checkpoint, and both come again when the steps after it are repeated. So the same
    step is refused again, and draws the same later prompts. A roll-back leaves no other trace in the trajectory than
    those prompts, wherever the checkpoint was: the reward average is restored with it, and the figures of a step count
    the events up to that step only.

    Nor can a roll-back be endless: a row of events ends only with a step that is accepted at its first try, beyond
    every step ever refused. Hence at most `max_events` roll-backs for each step of the run, even if repeated steps did
    not end as before. What a crash takes of a row, the supervisor's count of restarts bounds.

    Args:
        config: the bounds and what to do beyond them.
        quiet: log nothing, because another rank says it.
    """

    def __init__(self, config: GuardsConfig, *, quiet: bool = False) -> None:
        self._config, self._quiet = config, quiet
        self._step, self._reward = 0, 0.0
        self.refused: Event | None = None
        """Why the batch at hand is refused; None as long as it is not."""
        self._average: float | None = None
        self._skips = 0
        # By refused step: how often, and where in the stream it draws its prompts from.
        self._rollbacks: dict[int, tuple[int, int]] = {}
        self._row: list[Event] = []

    @property
    def step(self) -> int:
        """The step of the batch at hand."""
        return self._step

    @property
    def rolls_back(self) -> bool:
        """Whether a refused batch sends the run back to its newest checkpoint."""
        return self._config.action == "rollback"

    def begin(self, step: int, reward_mean: float) -> None:
        """A new batch. Refuses it if its mean reward is not finite, or lies too far below the average of the accepted
        ones before."""
        self._step, self._reward, self.refused = step, reward_mean, None
        drop = 0.0 if self._average is None else self._average - reward_mean
        if not math.isfinite(reward_mean):
            self.refused = Event(step, "reward", "mean", reward_mean, None)
        elif self._config.max_reward_drop is not None and drop > self._config.max_reward_drop:
            self.refused = Event(step, "reward", "drop", drop, self._config.max_reward_drop)

    def allows(self, who: str, **figures: float) -> bool:
        """Whether the update may go on with these `figures` of a mini-batch; once it may not, the whole batch is
        refused.

        Args:
            who: `actor` or `critic`.
            figures: `loss` (bound: `max_loss`, for its size), `kl` and `ref_kl` (per token; bound: `max_kl`),
                `grad_norm`; all must be finite.
        """
        for name, value in figures.items():
            if self.refused is not None:
                break
            bound = getattr(self._config, _BOUNDS[name]) if name in _BOUNDS else None
            if not math.isfinite(value):
                self.refused = Event(self._step, who, name, value, None)
            elif bound is not None and (abs(value) if name == "loss" else value) > bound:
                self.refused = Event(self._step, who, name, value, bound)
        return self.refused is None

    def settle(self, step: int, *, last: bool = False) -> Decision:
        """The decision on the batch of `step`, the run's last one or not, once its updates are made or given up.

        Raises:
            UserError: the batch is refused and `action` is `stop`, or more than `max_events` are refused in a row; or
                the run would end with every batch refused for figures that are not finite.
        """
        if self.refused is None:
            old = self._reward if self._average is None else self._average
            self._average = old + NEWEST_WEIGHT * (self._reward - old)
            if step > max(self._rollbacks, default=0):
                self._row.clear()
            return "train"
        self._row.append(self.refused)
        action = self._config.action
        nothing = last and self._average is None and all(event.bound is None for event in self._row)
        if action == "stop" or len(self._row) > self._config.max_events or (nothing and action == "skip"):
            raise UserError(self._evidence())
        if not self._quiet:
            logger.warning(
                "A batch is refused at %s (guards.action=%s; %d in a row, guards.max_events=%d).",
                self.refused,
                action,
                len(self._row),
                self._config.max_events,
            )
        if action == "skip":
            self._skips += 1
            return "skip"
        return "rollback"

    def metrics(self) -> dict[str, float]:
        """Events at the steps up to this one (a repeated step has the figures that it had before), and whether it is
        one itself."""
        return {
            "guards/skips": self._skips,
            "guards/rollbacks": sum(times for step, (times, _) in self._rollbacks.items() if step <= self._step),
            "guards/refused": int(self.refused is not None),
        }

    def remember(self, position: int) -> dict[str, Any]:
        """Count the roll-back of the refused step, and return what must outlive the restoring of a checkpoint, for
        `recall`.

        Args:
            position: where the stream of prompts stands after the refused step's prompts; the step draws from there
                when it comes again.
        """
        times, _ = self._rollbacks.get(self._step, (0, 0))
        self._rollbacks[self._step] = (times + 1, position)
        state = self.state_dict()
        return {name: state[name] for name in ("rollbacks", "row")}

    def recall(self, memory: dict[str, Any]) -> None:
        """Know again what `remember` returned, after a checkpoint's state was loaded."""
        self.load_state_dict(self.state_dict() | memory)

    def skip_for(self, step: int) -> int | None:
        """The position in the stream of prompts that `step` must draw from, at least; None unless its data is left
        out."""
        return self._rollbacks[step][1] if step in self._rollbacks else None

    def state_dict(self) -> dict[str, Any]:
        """Everything that later decisions depend on, as plain JSON values."""
        return {
            "reward_average": self._average,
            "skips": self._skips,
            "rollbacks": [[step, *entry] for step, entry in sorted(self._rollbacks.items())],
            # JSON has no NaN, and one NaN does not equal another where states are compared.
            "row": [[event.step, event.who, event.figure, repr(event.value), event.bound] for event in self._row],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken, before the next batch."""
        self.refused = None
        self._average, self._skips = state["reward_average"], state["skips"]
        self._rollbacks = {step: (times, position) for step, times, position in state["rollbacks"]}
        self._row = [Event(step, who, figure, float(value), bound) for step, who, figure, value, bound in state["row"]]

    def _evidence(self) -> str:
        row, config = self._row, self._config
        if config.action == "stop":
            what = f"The guards refused a batch (guards.action=stop):\n  {row[-1]}"
        elif len(row) <= config.max_events:
            events = "".join(f"\n  {event}" for event in row)
            what = f"The guards refused every batch of the run, which has trained nothing:{events}"
        else:
            events = "".join(f"\n  {event}" for event in row)
            what = (
                f"The guards refused {len(row)} batches in a row, more than "
                f"guards.max_events={config.max_events}:{events}"
            )
        rates = sorted({"critic.optim.lr" if event.who == "critic" else "actor.optim.lr" for event in row})
        bounds = sorted({f"guards.{_BOUNDS[event.figure]}" for event in row if event.bound is not None})
        raise_bounds = f"raise {' and '.join(bounds)}; " if bounds else ""
        return (
            f"{what}\nLower {' and '.join(rates)}; look at the prompts and rewards of these steps; {raise_bounds}"
            "trainer.allow_config_change=true lets the run go on from its newest checkpoint with other settings."
        )
