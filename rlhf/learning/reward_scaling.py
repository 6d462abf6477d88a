"""Scales rewards before the advantages: normalizes them over a batch or the run so far, and clips them."""

import math
from typing import Any

import torch
from torch import Tensor

from rlhf.batch import RolloutBatch
from rlhf.config import AlgorithmConfig
from rlhf.learning.guards import Guards
from rlhf.ranks.collectives import all_sum

EPSILON = 1e-8


class RewardScaling:
    """Normalizes and clips the total rewards of responses: clip((s - mean) / sqrt(var + 1e-8), low, high).

    Mean and unbiased variance are over the batch on all ranks. With `running`, they are over all responses of the run
    so far, including this batch, but without batches that the guards rejected for their rewards.

    Source: Zheng et al., "Secrets of RLHF in Large Language Models Part I: PPO" (arXiv 2307.04964) section 5.3.1.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        self._kind, self._bounds = config.normalize_reward, config.reward_clip_range
        self._count, self._mean, self._squares = 0.0, 0.0, 0.0

    @property
    def remembers(self) -> bool:
        """Whether the statistics include earlier batches."""
        return self._kind == "running"

    def apply(self, batch: RolloutBatch, guards: Guards) -> tuple[Tensor, Tensor | None, dict[str, float]]:
        """Return the scaled scores and baselines of `batch`, [N] each, and metrics over all ranks. Collective."""
        scores, baselines, metrics = batch.scores.double(), batch.baselines, dict[str, float]()
        counted = batch.has_score
        if self._kind is not None:
            mean, deviation = self._moments(scores[counted], guards)
            scores = (scores - mean) / deviation
            # Subtract the same mean, because the estimator uses the difference of score and baseline.
            baselines = None if baselines is None else (baselines.double() - mean) / deviation
            metrics |= {"reward/norm_mean": mean, "reward/norm_std": deviation}
        if self._bounds is not None:
            low, high = self._bounds
            outside = (((scores < low) | (scores > high)) & counted).double().sum()
            clipped, count = all_sum(torch.stack([outside, counted.double().sum()])).tolist()
            scores = scores.clamp(low, high)
            baselines = None if baselines is None else baselines.clamp(low, high)
            metrics["reward/clip_frac"] = clipped / max(count, 1.0)
        return scores.to(batch.scores.dtype), None if baselines is None else baselines.to(batch.scores.dtype), metrics

    def _moments(self, scores: Tensor, guards: Guards) -> tuple[float, float]:
        """Return mean and deviation of all ranks' `scores`; with `running`, of all scores of the run so far."""
        total, count = all_sum(torch.stack([scores.sum(), scores.new_tensor(len(scores))])).tolist()
        mean = total / max(count, 1.0)
        squares = all_sum((scores - mean).square().sum()).item()
        if self.remembers:
            # Chan et al., "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances" (1979).
            total_count, difference = self._count + count, mean - self._mean
            squares += self._squares + difference**2 * self._count * count / max(total_count, 1.0)
            mean = self._mean + difference * count / max(total_count, 1.0)
            count = total_count
            if guards.rejected is None:
                self._count, self._mean, self._squares = count, mean, squares
        return mean, math.sqrt(squares / max(count - 1, 1.0) + EPSILON)

    def state_dict(self) -> dict[str, Any]:
        """Return count, mean and sum of squared deviations of the rewards so far."""
        return {"count": self._count, "mean": self._mean, "squares": self._squares}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._count, self._mean, self._squares = int(state["count"]), float(state["mean"]), float(state["squares"])
