"""Computes importance weights and masks for samples whose rollout policy differs from the policy in training."""

import math

import torch
from torch import Tensor

from rlhf.algorithms.statistics import masked

LOG_RATIO_BOUND = 20.0


@torch.no_grad()
def rollout_is_weights(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    level: str,
    threshold: float,
    lower: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return truncated importance weights min(exp(old - rollout), threshold) for the policy loss, without gradient.

    With `lower`, weights below `lower` or above `threshold` are 0 instead of truncated.

    Args:
        old_log_probs: [N, R] from the training engine, before the update.
        rollout_log_probs: [N, R] from the rollout engine, at sampling.
        mask: [N, R], 1 on response tokens.
        level: `token` for a weight per token; `sequence` for one weight per response, the product of its tokens'
            ratios. The logarithm is clamped to +-20.
        threshold: the largest weight; with `lower`=None, larger weights are truncated to `threshold`.
        lower: the smallest weight; weights outside [lower, threshold] become 0.

    Returns:
        The weights, and an indicator that is 1 where a weight was truncated or set to 0; both [N, R], 0 outside the
        mask.

    Source: Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025) for tokens; Liu
    et al., "When Speed Kills Stability" (2025) for sequences; IcePop, in Ring-1T (arXiv 2510.18855), for `lower`.
    """
    log_ratios = masked(old_log_probs - rollout_log_probs, mask)
    if level == "sequence":
        log_ratios = log_ratios.sum(dim=1, keepdim=True).expand_as(mask)
    ratios = torch.exp(torch.clamp(log_ratios, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))
    outside = ratios > threshold if lower is None else (ratios > threshold) | (ratios < lower)
    weights = ratios.clamp(max=threshold) if lower is None else torch.where(outside, 0.0, ratios)
    return masked(weights, mask), masked(outside.to(ratios.dtype), mask)


def weight_sums(weights: Tensor, mask: Tensor) -> Tensor:
    """Return the number of tokens in the mask, and the sum and sum of squares of their weights, [3] float64."""
    inside = masked(weights, mask).double()
    return torch.stack([mask.double().sum(), inside.sum(), inside.square().sum()])


def effective_sample_size(sums: Tensor) -> float:
    """Return (sum w)^2 / (n * sum w^2) from `weight_sums` of all tokens; 0 if all weights are 0.

    1 means equal weights, 1 / n that a single token has all the weight.

    Source: Kong, "A Note on Importance Sampling using Standardized Weights" (1992), divided by n as in verl.
    """
    tokens, total, squares = sums.tolist()
    return total**2 / (tokens * squares) if squares else 0.0


@torch.no_grad()
def accepted(
    old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, kind: str, threshold: float, lower: float | None
) -> Tensor:
    """Select the tokens for training by rejection sampling: the tokens on which both policies nearly agree.

    With d = old - rollout, clamped to +-20, the divergence of a token is `k1`: d; `k2`: d^2 / 2; `k3`: exp(d) - 1 - d.

    Args:
        old_log_probs, rollout_log_probs, mask: [N, R] each, as in `rollout_is_weights`.
        kind: `token_k1` decides per token; `seq_sum_k1` and `seq_mean_k1` decide per response by the sum or the mean of
            its tokens' divergences. The same names exist for k2 and k3, and `seq_max_k2` and `seq_max_k3` decide by the
            maximum. The mean of k1 is the logarithm of the geometric mean of the ratios.
        threshold: the largest divergence for k2 and k3, the largest ratio exp(d) for k1.
        lower: the smallest ratio for k1; None for 1 / threshold.

    Returns:
        [N, R] bool: True on accepted tokens of the mask.

    Source: Liu et al., "When Speed Kills Stability" (2025), as in verl's rollout correction.
    """
    level, divergence = kind.rsplit("_", 1)
    d = torch.clamp(masked(old_log_probs - rollout_log_probs, mask), -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    values = {"k1": d, "k2": d.square() / 2, "k3": torch.expm1(d) - d}[divergence]
    if level == "seq_max":
        # k2 and k3 are never negative, so zeros outside the mask do not raise their maximum.
        values = values.amax(dim=1, keepdim=True) if values.shape[1] else values
    elif level != "token":
        values = values.sum(dim=1, keepdim=True)
        if level == "seq_mean":
            values = values / mask.bool().sum(dim=1, keepdim=True).clamp(min=1)
    if divergence == "k1":
        least = math.log(1 / threshold if lower is None else lower)
        near = (values >= least) & (values <= math.log(threshold))
    else:
        near = values <= threshold
    return mask.bool() & near
