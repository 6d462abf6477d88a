"""Computes advantages from rewards: subtracts the KL in the reward, then applies the algorithm's estimator."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf.algorithms.advantages import EstimatorInput
from rlhf.algorithms.aggregation import loss_count, loss_sum
from rlhf.algorithms.kl import adapted_coefficient, kl_estimate
from rlhf.algorithms.lookup import load_estimator
from rlhf.algorithms.statistics import masked
from rlhf.batch import RolloutBatch
from rlhf.config import AlgorithmConfig
from rlhf.learning.guards import Guards
from rlhf.learning.joined_rows import JoinedRows
from rlhf.learning.reward_scaling import RewardScaling
from rlhf.ranks.collectives import all_max, all_sum

Policies = tuple[Tensor, Tensor]
"""Log-probs by the policy before the update and by the reference, [N, R] each."""


class Credit(NamedTuple):
    """Advantages and returns of each response token."""

    advantages: Tensor
    """[N, R] float32: zero outside the mask."""
    returns: Tensor | None
    """[N, R] float32: targets of the critic; None without a critic."""
    mask: Tensor
    """[N, R] bool: tokens that the policy wrote, without truncated responses if `mask_truncated_responses` is set."""

    def means(self, samples: Tensor | None = None) -> list[float]:
        """Return each sample's mean advantage. `samples` as in `RolloutBatch`."""
        sums, tokens = self.advantages.double().sum(1), self.mask.sum(1)
        if samples is not None and len(samples):
            sums, tokens = (each.new_zeros(int(samples[-1]) + 1).index_add(0, samples, each) for each in (sums, tokens))
        return (sums / tokens.clamp(min=1)).tolist()


class Advantages:
    """Applies the advantage estimator. Its state is the coefficient of the KL in the reward, fixed or adaptive."""

    def __init__(self, config: AlgorithmConfig, group_size: int) -> None:
        self._config, self._group_size = config, group_size
        self._estimator = load_estimator(config.adv_estimator)
        self.kl_coef = config.kl_ctrl.kl_coef
        self.scaling = RewardScaling(config)
        self.uses_kl = config.kl_in_reward
        """Whether `estimate` needs `policies`: the log-probs by the policy before the update and by the reference."""

    def estimate(
        self, batch: RolloutBatch, values: Tensor | None, policies: Policies | None, guards: Guards
    ) -> tuple[Credit, dict[str, float]]:
        """Return the credit of the tokens of `batch`, and metrics over all ranks. Collective.

        The estimator receives the rows of an episode as one sequence (`JoinedRows`). `mask_truncated_responses` masks
        truncated responses after the estimator, so their scores still count in the statistics of their group and of
        the batch.

        Args:
            batch: has `baselines` if the estimator needs them (ReMax).
            values: [N, R] by the critic; None without a critic.
            policies: None without a KL in the reward.
        """
        joined = JoinedRows.of(batch)
        mask = batch.response_mask if joined is None else joined.join(batch.response_mask)
        if joined is not None:
            values = None if values is None else joined.join(values)
            policies = None if policies is None else (joined.join(policies[0]), joined.join(policies[1]))
        scores, baselines, metrics = self.scaling.apply(batch, guards)
        rewards = scores_on_last_tokens(scores, mask)
        if policies is not None:
            kl_rewards, kl_metrics = self._kl_rewards(policies, mask, guards)
            rewards, metrics = rewards - kl_rewards, metrics | kl_metrics
        inputs = EstimatorInput(rewards, mask.float(), self._group_size, values, baselines, all_sum, batch.failed)
        credit = Credit(*self._estimator(inputs, self._config), mask)
        if self._config.mask_truncated_responses:
            credit, share_metrics = _without_truncated(credit, batch.truncated)
            metrics |= share_metrics
        metrics |= _advantage_metrics(credit.advantages, credit.mask)
        if joined is not None:
            returns = None if credit.returns is None else joined.split(credit.returns)
            # Returning the batch's own mask object shows callers that no token was masked.
            of_rows = batch.response_mask if credit.mask is mask else joined.split(credit.mask)
            credit = Credit(joined.split(credit.advantages), returns, of_rows)
        return credit, metrics

    def _kl_rewards(self, policies: Policies, mask: Tensor, guards: Guards) -> tuple[Tensor, dict[str, float]]:
        """Return the KL penalty on each token's reward, [N, R], and adapt the coefficient for the next batch."""
        control, coefficient = self._config.kl_ctrl, self.kl_coef
        kl = masked(kl_estimate(*policies, self._config.kl_penalty), mask)
        mode = "seq-mean-token-mean"
        shares = torch.stack([loss_sum(kl, mask, mode).double(), loss_count(mask, mode).double()])
        total, samples = all_sum(shares).tolist()
        mean = total / max(samples, 1.0)
        metrics = {"reward/kl": mean, "reward/kl_coef": coefficient}
        # Adapt only if the guards allow the KL, because a coefficient that became NaN would stay NaN.
        if guards.allows("actor", kl_in_reward=mean) and control.type == "adaptive":
            self.kl_coef = adapted_coefficient(coefficient, mean, int(samples), control.target_kl, control.horizon)
        return coefficient * kl, metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the coefficient for the next batch, and its configured start value."""
        return {"kl_coef": self.kl_coef, "started_at": self._config.kl_ctrl.kl_coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the coefficient if it is adaptive and the setting of its start value is unchanged."""
        control = self._config.kl_ctrl
        if control.type == "adaptive" and control.kl_coef == state["started_at"]:
            self.kl_coef = float(state["kl_coef"])


def scores_on_last_tokens(scores: Tensor, mask: Tensor) -> Tensor:
    """Return token rewards, [N, R] float32: each score of [N] on the last token of `mask`, [N, R] bool, zero elsewhere.

    A response without a token of the policy gets no reward.
    """
    last = mask & (mask.cumsum(1) == mask.sum(1, keepdim=True))
    return torch.where(last, scores[:, None], 0.0)


def _without_truncated(credit: Credit, truncated: Tensor) -> tuple[Credit, dict[str, float]]:
    """Return the credit without the `truncated` responses, [N] bool, and their share over all ranks.

    Source: DAPO (arXiv 2503.14476) section 3.4, overlong filtering; TRL's `mask_truncated_completions`.
    """
    cut = truncated[:, None]
    returns = None if credit.returns is None else credit.returns.masked_fill(cut, 0.0)
    left = Credit(credit.advantages.masked_fill(cut, 0.0), returns, credit.mask & ~cut)
    counts = torch.stack([cut.sum(), torch.tensor(len(cut), device=cut.device)])
    masked_out, samples = all_sum(counts.double()).tolist()
    return left, {"advantages/truncated_masked": masked_out / max(samples, 1.0)}


def _advantage_metrics(advantages: Tensor, mask: Tensor) -> dict[str, float]:
    """Return mean, standard deviation and, unless all masks are empty, extremes of the advantages. Collective."""
    sums = [loss_sum(values, mask, "token-mean").double() for values in (advantages, advantages.square())]
    shares = all_sum(torch.stack([*sums, mask.sum().double()]))
    extremes = all_max(torch.stack([_highest(advantages, mask), _highest(-advantages, mask)]))
    # Transfer all numbers together, so that the host waits for the device once.
    total, square, tokens, high, low = torch.cat([shares, extremes]).tolist()
    mean = total / max(tokens, 1.0)
    metrics = {"advantages/mean": mean, "advantages/std": max(square / max(tokens, 1.0) - mean**2, 0.0) ** 0.5}
    return metrics | {"advantages/min": -low, "advantages/max": high} if tokens else metrics


def _highest(values: Tensor, mask: Tensor) -> Tensor:
    inside = torch.where(mask, values.double(), -torch.inf)
    return inside.max() if inside.numel() else inside.new_tensor(-torch.inf)
