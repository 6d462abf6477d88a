"""Computes policy and value losses per token."""

from typing import NamedTuple

import torch
from torch import Tensor

from rlhf.algorithms.statistics import masked
from rlhf.config import ActorConfig

LOG_RATIO_BOUND = 20.0
SEQUENCE_LOG_RATIO_BOUND = 10.0


class PolicyLoss(NamedTuple):
    """Result of a policy loss, before aggregation."""

    losses: Tensor
    """[N, R], zero outside the mask."""
    metrics: dict[str, Tensor]
    """Metrics without gradient, [N, R] each; a loss returns the same names at every call. The trainer logs their
    means over all response tokens as `actor/<name>`."""


def vanilla(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, config: ActorConfig
) -> PolicyLoss:
    """Return PPO's clipped surrogate with separate bounds below and above, and dual clip.

    The loss is max(-A * r, -A * clamp(r, 1 - low, 1 + high)) with r = exp(clamp(log_probs - old_log_probs, -20, 20)).
    For A < 0, dual clip bounds the loss by -A * clip_ratio_c.

    Args:
        log_probs, old_log_probs, advantages: [N, R]; only `log_probs` gets a gradient.
        mask: [N, R], 1 on response tokens.
        config: `clip_ratio_low`, `clip_ratio_high`, `clip_ratio_c`.

    Returns:
        The losses, and metrics that are 1 where clipping (`pg_clipfrac`) or dual clip (`pg_clipfrac_lower`) changed the
        loss.

    Source: PPO (arXiv 1707.06347) equation 7; DAPO (arXiv 2503.14476) equation 10 for separate bounds; Ye et al. (arXiv
    1912.09729) equation 5 for dual clip.
    """
    ratio, advantages = _ratio(log_probs, old_log_probs, mask), masked(advantages, mask)
    losses, clipped = _clipped(ratio, advantages, config)
    ceiling = -advantages * config.clip_ratio_c
    lowered = (advantages < 0) & (losses > ceiling)
    losses = torch.where(lowered, ceiling, losses)
    return PolicyLoss(losses, {"pg_clipfrac": clipped, "pg_clipfrac_lower": lowered.to(ratio.dtype)})


def gspo(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, config: ActorConfig) -> PolicyLoss:
    """Return the clipped surrogate with one ratio per response: the exponential of the mean log-ratio of its tokens.

    The ratio's value is the sequence ratio, but its gradient goes to each token's own log-prob. So advantages may
    differ within a response. The log-ratio is clamped to at most 10. Arguments as in `vanilla`; one metric,
    `pg_clipfrac`.

    Source: GSPO (arXiv 2507.18071) equations 5 and 7, and GSPO-token, equations 13 and 14.
    """
    differences = masked(log_probs - old_log_probs, mask)
    lengths = mask.bool().sum(dim=1, keepdim=True).clamp(min=1)
    of_sequence = differences.detach().sum(dim=1, keepdim=True) / lengths
    ratio = torch.exp(torch.clamp(differences - differences.detach() + of_sequence, max=SEQUENCE_LOG_RATIO_BOUND))
    losses, clipped = _clipped(ratio, masked(advantages, mask), config)
    return PolicyLoss(losses, {"pg_clipfrac": clipped})


def cispo(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, config: ActorConfig
) -> PolicyLoss:
    """Return the REINFORCE loss with a clipped importance weight: -sg(clamp(r, 1 - low, 1 + high)) * A * log_prob.

    The weight has no gradient (sg), so clipping never removes a token's gradient. Arguments and r as in `vanilla`; one
    metric, `pg_clipfrac`: 1 on tokens with a clipped weight.

    Source: CISPO, in MiniMax-M1 (arXiv 2506.13585) equations 4 and 5.
    """
    ratio = _ratio(log_probs, old_log_probs, mask).detach()
    weights = torch.clamp(ratio, 1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
    losses = -weights * masked(advantages, mask) * masked(log_probs, mask)
    return PolicyLoss(losses, {"pg_clipfrac": masked((weights != ratio).to(ratio.dtype), mask)})


def clip_cov(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, config: ActorConfig, chosen: Tensor
) -> PolicyLoss:
    """Return PPO's clipped surrogate, 0 on the `chosen` tokens ([N, R], 0 or 1), without dual clip.

    The caller chooses at random among tokens with a large covariance of log-prob and advantage. Other arguments as in
    `vanilla`. Metrics: `pg_clipfrac`, 1 on tokens where clipping changed the loss; `clip_cov_frac`, 1 on chosen tokens.

    Source: Clip-Cov (arXiv 2505.22617).
    """
    losses, clipped = _clipped(_ratio(log_probs, old_log_probs, mask), masked(advantages, mask), config)
    chosen = masked(chosen, mask)
    return PolicyLoss(losses * (1 - chosen), {"pg_clipfrac": clipped, "clip_cov_frac": chosen})


def kl_cov(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, config: ActorConfig, chosen: Tensor
) -> PolicyLoss:
    """Return the surrogate -A * r without clip, plus ppo_kl_coef * |log_probs - old_log_probs| on `chosen` tokens.

    `chosen` ([N, R], 0 or 1): the tokens with the largest covariance of log-prob and advantage. Other arguments as in
    `vanilla`; one metric, 1 on chosen tokens (`kl_cov_frac`).

    Source: KL-Cov (arXiv 2505.22617), with the penalty of verl and of the authors' code.
    """
    chosen, away = masked(chosen, mask), masked(log_probs - old_log_probs, mask).abs()
    surrogate = -masked(advantages, mask) * _ratio(log_probs, old_log_probs, mask)
    return PolicyLoss(surrogate + config.policy_loss.ppo_kl_coef * chosen * away, {"kl_cov_frac": chosen})


def sapo(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, config: ActorConfig) -> PolicyLoss:
    """Return the surrogate with a soft gate instead of a clip: -A * 4 / tau * sigmoid(tau * (r - 1)).

    tau is `tau_pos` for A > 0, else `tau_neg`. The gradient is that of -A * r, times a weight 4 p (1 - p), where p is
    the sigmoid. The weight is 1 at r = 1, falls with the distance of r from 1, and is never 0. Arguments as in
    `vanilla`; one metric, the weight (`sapo_weight`).

    Source: SAPO (arXiv 2511.20347).
    """
    ratio, advantages = _ratio(log_probs, old_log_probs, mask), masked(advantages, mask)
    temperatures = torch.where(advantages > 0, config.tau_pos, config.tau_neg)
    gates = torch.sigmoid(temperatures * (ratio - 1))
    weights = 4 * gates.detach() * (1 - gates.detach())
    return PolicyLoss(-advantages * gates * 4 / temperatures, {"sapo_weight": masked(weights, mask)})


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, cliprange: float) -> tuple[Tensor, Tensor]:
    """Return 0.5 * max((v - R)^2, (clamp(v, v_old - cliprange, v_old + cliprange) - R)^2) per token.

    Also return an indicator that is 1 where clipping changed the loss. Tensors are [N, R]; only `values` gets a
    gradient. No mask is applied.

    Source: the value clipping of OpenAI's PPO implementation (baselines, ppo2), as in verl.
    """
    bounded = torch.clamp(values, old_values - cliprange, old_values + cliprange)
    plain, clipped = (values - returns).square(), (bounded - returns).square()
    return 0.5 * torch.maximum(plain, clipped), (clipped > plain).to(values.dtype)


def _ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """Return each token's probability ratio, 1 outside the mask."""
    return torch.exp(torch.clamp(masked(log_probs - old_log_probs, mask), -LOG_RATIO_BOUND, LOG_RATIO_BOUND))


def _clipped(ratio: Tensor, advantages: Tensor, config: ActorConfig) -> tuple[Tensor, Tensor]:
    """Return the clipped surrogate, and 1 where clipping changed it."""
    plain = -advantages * ratio
    clipped = -advantages * torch.clamp(ratio, 1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
    changed = clipped > plain
    # Not `maximum`: at equality half of its gradient goes to `clipped`, and from torch 2.14 on `clamp` has no gradient
    # at its bounds. With clip_ratio_low=0, the gradient at r = 1 would be halved.
    return torch.where(changed, clipped, plain), changed.to(ratio.dtype)
