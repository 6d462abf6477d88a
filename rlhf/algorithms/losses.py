"""Policy losses, per token."""

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0


def clipped_policy_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate with separate bounds below and above.

    loss = max(-A * r, -A * clamp(r, 1 - low, 1 + high)) with r = exp(clamp(log_probs - old_log_probs, -20, 20)).

    Args:
        log_probs, old_log_probs, advantages: [batch, tokens].

    Returns:
        The loss of each token and whether the clipped branch was taken (as 0 or 1), both [batch, tokens].

    Source: PPO (arXiv 1707.06347) equation 7; DAPO (arXiv 2503.14476) equation 10 for the decoupled bounds.
    """
    ratio = torch.exp(torch.clamp(log_probs - old_log_probs, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))
    unclipped = -advantages * ratio
    clipped = -advantages * torch.clamp(ratio, 1 - clip_low, 1 + clip_high)
    return torch.maximum(unclipped, clipped), (clipped > unclipped).to(ratio.dtype)
