"""Advantages of a batch from its rewards: the KL in the reward, then the estimator that the algorithm names."""

from dataclasses import replace
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
from rlhf.learning.reward_scaling import RewardScaling
from rlhf.ranks.collectives import all_max, all_sum


class Advantages:
    """The estimator with the coefficient of the KL in the reward, which an adaptive controller moves."""

    def __init__(self, config: AlgorithmConfig, group_size: int) -> None:
        self._config, self._group_size = config, group_size
        self._estimator = load_estimator(config.adv_estimator)
        self.kl_coef = config.kl_ctrl.kl_coef
        self.scaling = RewardScaling(config)
        self.uses_kl = config.kl_in_reward
        """Whether `fill` needs `old_log_probs` and `ref_log_probs`."""
        self.reads = ("values", "old_log_probs", "ref_log_probs") if self.uses_kl else ("values",)
        """Per-token fields of a batch that `fill` reads; without a critic there are no values."""
        masks = config.mask_truncated_responses
        self.writes = ("advantages", "returns", "response_mask") if masks else ("advantages", "returns")
        """Per-token fields of a batch that `fill` sets for the update."""

    def fill(self, batch: Batch, guards: Guards) -> dict[str, float]:
        """Set `token_rewards`, `advantages` and `returns` of `batch`; returns figures over all ranks. Collective.

        Needs `values` with a critic, `baselines` for ReMax. Truncated responses that are to be masked leave the mask
        after the estimator has seen them: their scores count in the statistics of their group and of the batch.
        """
        mask = batch.response_mask
        scores, baselines, figures = self.scaling.apply(batch, guards)
        batch.token_rewards = replace(batch, scores=scores).scores_on_last_tokens()
        if self.uses_kl:
            figures |= self._subtract_kl(batch, mask, guards)
        inputs = EstimatorInput(batch.token_rewards, mask, self._group_size, batch.values, baselines, all_sum)
        batch.advantages, batch.returns = self._estimator(inputs, self._config)
        if self._config.mask_truncated_responses:
            figures |= _mask_truncated(batch)
        return figures | _advantage_figures(batch.advantages, batch.response_mask)

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


def _mask_truncated(batch: Batch) -> dict[str, float]:
    """Take truncated responses out of the mask, the advantages and the returns of `batch`; the share of them over all
    ranks.

    Source: DAPO (arXiv 2503.14476) section 3.4, overlong filtering; TRL's `mask_truncated_completions`.
    """
    assert batch.truncated is not None
    assert batch.advantages is not None
    cut = batch.truncated[:, None]
    batch.response_mask = batch.response_mask.masked_fill(cut, 0.0)
    batch.advantages = batch.advantages.masked_fill(cut, 0.0)
    if batch.returns is not None:
        batch.returns = batch.returns.masked_fill(cut, 0.0)
    counts = torch.stack([cut.sum(), torch.tensor(len(cut), device=cut.device)])
    masked_out, samples = all_sum(counts.double()).tolist()
    return {"advantages/truncated_masked": masked_out / max(samples, 1.0)}


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
