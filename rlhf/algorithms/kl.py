"""Estimates the KL divergence from the policy to the reference per sampled token, and adapts the KL coefficient."""

import torch
from torch import Tensor

K3_BOUND = 10.0
LOG_RATIO_BOUND = 20.0
COEFFICIENT_BOUND = 0.2


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, kind: str) -> Tensor:
    """Estimate KL(policy || reference) at each token, sampled by the policy, from d = log_probs - ref_log_probs.

    `k1`: d (unbiased). `k2`: d^2 / 2. `k3`: exp(-d) - 1 + d (unbiased, never negative), with -d clamped to +-20 and the
    result to +-10. `abs`: |d|. With `+` (`k1+`, `k3+`, `abs+`) the gradient is that of k2, whose expectation is the
    gradient of the KL.

    Log-probs and the result are [N, R]; no mask is applied. Raises KeyError for an unknown `kind`.

    Source: J. Schulman, "Approximating KL Divergence" (2020); Tang and Munos (arXiv 2506.09477) for the gradient of k2.
    """
    difference = log_probs - ref_log_probs
    if kind in _STRAIGHT_THROUGH:
        gradient = _ESTIMATORS["k2"](difference)
        return _ESTIMATORS[_STRAIGHT_THROUGH[kind]](difference.detach()) + (gradient - gradient.detach())
    return _ESTIMATORS[kind](difference)


@torch.no_grad()
def kl_metric(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Return `kl_estimate` by k3 for metrics, [N, R] float64, without the cancellation of exp(-d) - 1 + d for small d.

    Losses and rewards keep the plain formula, so that their bits equal those of earlier releases. expm1 would not make
    the gradient exp(-d) - 1 more exact.
    """
    x = torch.clamp(ref_log_probs.double() - log_probs, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return torch.clamp(torch.expm1(x) - x, max=K3_BOUND)


def corrected_kl(log_probs: Tensor, old_log_probs: Tensor, ref_log_probs: Tensor, kind: str) -> Tensor:
    """Estimate KL(policy || reference) at each token, sampled by an older policy: r * `kl_estimate`.

    The ratio is r = exp(log_probs - old_log_probs), with the logarithm clamped to +-20. For `k1`, `k3` and `abs` the
    gradient also goes through the ratio; for k3 it is then r * d times the gradient of log_probs. For `k2` and kinds
    with `+` the ratio is detached, because `kl_estimate` already has the gradient of the KL. So the expected gradient
    is the KL's for all kinds but `abs`.

    Log-probs are [N, R]; only `log_probs` gets a gradient. No mask is applied.

    Source: DeepSeek-V3.2 (arXiv 2512.02556) equation 7, for k3.
    """
    ratio = torch.exp(torch.clamp(log_probs - old_log_probs, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))
    constant = kind == "k2" or kind in _STRAIGHT_THROUGH
    return (ratio.detach() if constant else ratio) * kl_estimate(log_probs, ref_log_probs, kind)


def adapted_coefficient(coef: float, kl: float, samples: int, target: float, horizon: int) -> float:
    """Return the next KL coefficient in the reward: coef * (1 + clip(kl / target - 1, -0.2, 0.2) * samples / horizon).

    Args:
        coef: the coefficient in this step's rewards.
        kl: this step's KL, the mean over sequences of the mean over tokens.
        samples: sequences of this step over all ranks.
        target: the desired KL.
        horizon: number of samples over which the coefficient reacts.

    Source: Ziegler et al. (arXiv 1909.08593) section 2.2.
    """
    error = min(max(kl / target - 1, -COEFFICIENT_BOUND), COEFFICIENT_BOUND)
    return coef * (1 + error * samples / horizon)


def _k3(difference: Tensor) -> Tensor:
    x = torch.clamp(-difference, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return torch.clamp(torch.exp(x) - x - 1, -K3_BOUND, K3_BOUND)


_ESTIMATORS = {"k1": lambda d: d, "k2": lambda d: d.square() / 2, "k3": _k3, "abs": torch.abs}
_STRAIGHT_THROUGH = {"k1+": "k1", "k3+": "k3", "abs+": "abs"}
