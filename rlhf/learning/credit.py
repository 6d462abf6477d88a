"""Advantages of a batch from its rewards: the KL in the reward, then the estimator that the algorithm names."""

from typing import Any

import torch
from torch import Tensor

from rlhf.algorithms.advantages import EstimatorInput
from rlhf.algorithms.aggregation import loss_count, loss_sum
from rlhf.algorithms.kl import adapted_coefficient, kl_estimate
from rlhf.algorithms.lookup import load_estimator
from rlhf.algorithms.statistics import masked
from rlhf.batch import Batch
from rlhf.config import AlgorithmConfig
from rlhf.learning.guards import Guards
from rlhf.ranks.collectives import all_max, all_sum


class Advantages:
    """The estimator with the coefficient of the KL in the reward, which an adaptive controller moves."""

    def __init__(self, config: AlgorithmConfig, group_size: int) -> None:
        self._config, self._group_size = config, group_size
        self._estimator = load_estimator(config.adv_estimator)
        self.kl_coef = config.kl_ctrl.kl_coef
        self.uses_kl = config.kl_in_reward
        """Whether `fill` needs `old_log_probs` and `ref_log_probs`."""
        self.reads = ("values", "old_log_probs", "ref_log_probs") if self.uses_kl else ("values",)
        """Per-token fields of a batch that `fill` reads; without a critic there are no values."""

    def fill(self, batch: Batch, guards: Guards) -> dict[str, float]:
        """Set `token_rewards`, `advantages` and `returns` of `batch`; returns figures over all ranks. Collective.

        Needs `values` with a critic, `baselines` for ReMax.
        """
        figures = {}
        mask = batch.response_mask
        batch.token_rewards = batch.scores_on_last_tokens()
        if self.uses_kl:
            figures = self._subtract_kl(batch, mask, guards)
        inputs = EstimatorInput(batch.token_rewards, mask, self._group_size, batch.values, batch.baselines, all_sum)
        batch.advantages, batch.returns = self._estimator(inputs, self._config)
        return figures | _advantage_figures(batch.advantages, mask)

    def _subtract_kl(self, batch: Batch, mask: Tensor, guards: Guards) -> dict[str, float]:
        assert batch.token_rewards is not None
        assert batch.old_log_probs is not None
        assert batch.ref_log_probs is not None
        control = self._config.kl_ctrl
        kl = kl_estimate(batch.old_log_probs, batch.ref_log_probs, self._config.kl_penalty)
        kl = masked(kl, mask)
        batch.token_rewards = batch.token_rewards - self.kl_coef * kl
        mode = "seq-mean-token-mean"
        shares = torch.stack([loss_sum(kl, mask, mode).double(), loss_count(mask, mode).double()])
        total, samples = all_sum(shares).tolist()
        mean = total / max(samples, 1.0)
        figures = {"reward/kl": mean, "reward/kl_coef": self.kl_coef}
        # A coefficient that took in a NaN would stay one.
        if guards.allows("actor", kl_in_reward=mean) and control.type == "adaptive":
            self.kl_coef = adapted_coefficient(self.kl_coef, mean, int(samples), control.target_kl, control.horizon)
        return figures

    def state_dict(self) -> dict[str, Any]:
        """The coefficient of the next batch, and where it started."""
        return {"kl_coef": self.kl_coef, "started_at": self._config.kl_ctrl.kl_coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over `state_dict`; a fixed coefficient, and a changed start, are the configuration's word."""
        control = self._config.kl_ctrl
        if control.type == "adaptive" and control.kl_coef == state["started_at"]:
            self.kl_coef = state["kl_coef"]


def _advantage_figures(advantages: Tensor, mask: Tensor) -> dict[str, float]:
    """Mean, spread and extremes of the advantages [N, R] per response token of all ranks; no extremes where no rank
    has a token."""
    sums = [loss_sum(values, mask, "token-mean").double() for values in (advantages, advantages.square())]
    shares = all_sum(torch.stack([*sums, mask.sum().double()]))
    extremes = all_max(torch.stack([_highest(advantages, mask), _highest(-advantages, mask)]))
    # Read together: one wait for the device.
    total, square, tokens, high, low = torch.cat([shares, extremes]).tolist()
    mean = total / max(tokens, 1.0)
    figures = {"advantages/mean": mean, "advantages/std": max(square / max(tokens, 1.0) - mean**2, 0.0) ** 0.5}
    return figures | {"advantages/min": -low, "advantages/max": high} if tokens else figures


def _highest(values: Tensor, mask: Tensor) -> Tensor:
    """The largest of the masked values, float64; minus infinity if there is none."""
    inside = torch.where(mask.bool(), values.double(), -torch.inf)
    return inside.max() if inside.numel() else inside.new_tensor(-torch.inf)
