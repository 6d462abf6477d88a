"""Control of the policy's entropy: the weight of the entropy bonus, which an adaptive controller moves."""

from typing import Any

from rlhf.config import ActorConfig


class EntropyControl:
    """Weight of the entropy bonus in each optimizer step; an adaptive one holds the entropy above a target.

    With c the coefficient, e the entropy of the optimizer step before and t the target, the weight of a step is c where
    e <= t and 0 where not (c in the first step of all). After a step with entropy e, c grows by `delta` if e < t and
    falls by it if e > t, within its bounds.

    Source: Skywork-OR1 (arXiv 2505.22312), adaptive entropy control.
    """

    def __init__(self, config: ActorConfig) -> None:
        self._start, self._config = config.entropy_coeff, config.entropy_ctrl
        self._coefficient = config.entropy_coeff
        self._entropy: float | None = None

    @property
    def moves(self) -> bool:
        """Whether the weight adapts."""
        return self._config.type == "adaptive"

    @property
    def weight(self) -> float:
        """Weight of the bonus in the optimizer step to come."""
        idle = self.moves and self._entropy is not None and self._entropy > self._config.target_entropy
        return 0.0 if idle else self._coefficient

    def observe(self, entropy: float) -> None:
        """Take up the mean entropy per token of an optimizer step that was made."""
        if not self.moves:
            return
        control, self._entropy = self._config, entropy
        step = control.delta * ((entropy < control.target_entropy) - (entropy > control.target_entropy))
        self._coefficient = self._bounded(self._coefficient + step)

    def _bounded(self, coefficient: float) -> float:
        return min(max(coefficient, self._config.min_coeff), self._config.max_coeff)

    def state_dict(self) -> dict[str, Any]:
        """The coefficient and the entropy that the next step goes by, and where the coefficient started."""
        return {"coefficient": self._coefficient, "entropy": self._entropy, "started_at": self._start}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over `state_dict`; a fixed coefficient, a changed start and the bounds are the configuration's word."""
        self._entropy = state["entropy"]
        self._coefficient = self._start
        if self.moves and self._start == state["started_at"]:
            self._coefficient = self._bounded(state["coefficient"])
