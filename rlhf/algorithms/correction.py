"""Importance weights for samples of an engine whose policy is not quite the one in training."""

import torch
from torch import Tensor

from rlhf.algorithms.statistics import masked

LOG_RATIO_BOUND = 20.0


@torch.no_grad()
def rollout_is_weights(
    old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, level: str, threshold: float
) -> tuple[Tensor, Tensor]:
    """Truncated importance weights min(exp(old - rollout), threshold) for the policy loss; no gradient.

    Args:
        old_log_probs: [N, R] by the training engine, before the update.
        rollout_log_probs: [N, R]: what the rollout engine sampled with.
        mask: [N, R], 1 on response tokens.
        level: `token`, each by itself; or `sequence`, the product over the response, the same on all its tokens. The
            logarithm is kept within +-20.
        threshold: the largest weight.

    Returns:
        The weights, and which were truncated as 0 or 1; both [N, R] and 0 outside the mask.

    Source: Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025) for tokens; Liu
    et al., "When Speed Kills Stability" (2025) for sequences.
    """
    log_ratios = masked(old_log_probs - rollout_log_probs, mask)
    if level == "sequence":
        log_ratios = log_ratios.sum(dim=1, keepdim=True).expand_as(mask)
    ratios = torch.exp(torch.clamp(log_ratios, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))
    truncated = (ratios > threshold).to(ratios.dtype)
    return masked(ratios.clamp(max=threshold), mask), masked(truncated, mask)
