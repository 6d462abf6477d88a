"""Controls the policy's entropy by the weight of the entropy bonus, fixed or adaptive."""

from typing import Any

from rlhf.config import ActorConfig


class EntropyControl:
    """Computes the weight of the entropy bonus in each optimizer step.

    A fixed weight is `entropy_coeff`. An adaptive weight depends on the previous step's entropy e, with coefficient c
    and target t: c if e <= t, otherwise 0, and c in the first step. After a step, c grows by `delta` if e < t
    and falls by `delta` if e > t, within its bounds.

    Source: Skywork-OR1 (arXiv 2505.22312), adaptive entropy control.
    """

    def __init__(self, config: ActorConfig) -> None:
        self._start, self._config = config.entropy_coeff, config.entropy_ctrl
        self._coefficient = config.entropy_coeff
        self._entropy: float | None = None

    @property
    def is_adaptive(self) -> bool:
        return self._config.type == "adaptive"

    @property
    def weight(self) -> float:
        """Weight of the bonus in the next optimizer step."""
        idle = self.is_adaptive and self._entropy is not None and self._entropy > self._config.target_entropy
        return 0.0 if idle else self._coefficient

    def observe(self, entropy: float) -> None:
        """Adapt the coefficient to the mean entropy per token of an optimizer step."""
        if not self.is_adaptive:
            return
        control, self._entropy = self._config, entropy
        step = control.delta * ((entropy < control.target_entropy) - (entropy > control.target_entropy))
        self._coefficient = self._bounded(self._coefficient + step)

    def _bounded(self, coefficient: float) -> float:
        return min(max(coefficient, self._config.min_coeff), self._config.max_coeff)

    def state_dict(self) -> dict[str, Any]:
        """Return the coefficient and the entropy for the next step, and the configured start value."""
        return {"coefficient": self._coefficient, "entropy": self._entropy, "started_at": self._start}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the entropy, and the coefficient if it is adaptive and its start value is unchanged.

        A restored coefficient is clipped to the current bounds.
        """
        self._entropy = None if state["entropy"] is None else float(state["entropy"])
        self._coefficient = self._start
        if self.is_adaptive and self._start == state["started_at"]:
            self._coefficient = self._bounded(float(state["coefficient"]))
