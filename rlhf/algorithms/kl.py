"""Estimates the KL divergence from the policy to the reference per sampled token, and adapts the KL coefficient."""

import torch
from torch import Tensor

K3_BOUND = 10.0
LOG_RATIO_BOUND = 20.0
COEFFICIENT_BOUND = 0.2


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, kind: str) -> Tensor:
    """KL(policy || reference) per token that the policy sampled, with d = log_probs - ref_log_probs; without a mask.

    `k1`: d (unbiased). `k2`: d^2 / 2. `k3`: exp(-d) - 1 + d (unbiased, positive), -d within +-20 and the result within
    +-10. `abs`: |d|. With `+` (`k1+`, `k3+`, `abs+`) the gradient is k2's, whose expectation is the gradient of the KL.

    Log-probs are [N, R]. Raises KeyError for an unknown `kind`.

    Source: J. Schulman, "Approximating KL Divergence" (2020); Tang and Munos (arXiv 2506.09477) for the gradient of k2.
    """
    difference = log_probs - ref_log_probs
    if kind in _STRAIGHT_THROUGH:
        gradient = _ESTIMATORS["k2"](difference)
        return _ESTIMATORS[_STRAIGHT_THROUGH[kind]](difference.detach()) + (gradient - gradient.detach())
    return _ESTIMATORS[kind](difference)


def corrected_kl(log_probs: Tensor, old_log_probs: Tensor, ref_log_probs: Tensor, kind: str) -> Tensor:
    """KL(policy || reference) per token that an older policy sampled: r * `kl_estimate`, without a mask.

    The ratio is r = exp(log_probs - old_log_probs), with the logarithm within +-20. For `k1`, `k3` and `abs` the
    gradient goes through the ratio, too; for r * k3 it is r * d per token, the gradient of the KL. For `k2` and kinds
    with `+`, whose gradient is the KL's already, the ratio is a constant. So the expected gradient is the KL's for all
    kinds but `abs`. Log-probs are [N, R]; only `log_probs` gets a gradient.

    Source: DeepSeek-V3.2 (arXiv 2512.02556) equation 7, for k3.
    """
    ratio = torch.exp(torch.clamp(log_probs - old_log_probs, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))
    constant = kind == "k2" or kind in _STRAIGHT_THROUGH
    return (ratio.detach() if constant else ratio) * kl_estimate(log_probs, ref_log_probs, kind)


def adapted_coefficient(coef: float, kl: float, samples: int, target: float, horizon: int) -> float:
    """The next coefficient of the KL in the reward: coef * (1 + clip(kl / target - 1, -0.2, 0.2) * samples / horizon).

    Args:
        coef: the coefficient in this step's rewards.
        kl: this step's KL, the mean over sequences of the mean over tokens.
        samples: sequences of this step over all ranks.
        target, horizon: the desired KL, and the number of samples over which to react.

    Source: Ziegler et al. (arXiv 1909.08593) section 2.2.
    """
    error = min(max(kl / target - 1, -COEFFICIENT_BOUND), COEFFICIENT_BOUND)
    return coef * (1 + error * samples / horizon)


def _k3(difference: Tensor) -> Tensor:
    x = torch.clamp(-difference, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return torch.clamp(torch.exp(x) - x - 1, -K3_BOUND, K3_BOUND)


_ESTIMATORS = {"k1": lambda d: d, "k2": lambda d: d.square() / 2, "k3": _k3, "abs": torch.abs}
_STRAIGHT_THROUGH = {"k1+": "k1", "k3+": "k3", "abs+": "abs"}
