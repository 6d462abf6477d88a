"""Estimators of the KL divergence from the policy to the reference, per sampled token."""

import torch
from torch import Tensor

K3_BOUND = 10.0
LOG_RATIO_BOUND = 20.0


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, kind: str) -> Tensor:
    """KL(policy || reference) from tokens sampled by the policy, [batch, tokens] each, with d = log_probs - ref_log_probs.

    `k1`: d (unbiased). `k2`: d^2 / 2. `k3`: exp(-d) - 1 + d (unbiased, positive), d within +-20 and the result within +-10.
    Raises KeyError for another name. Source: J. Schulman, "Approximating KL Divergence" (2020).
    """
    difference = log_probs - ref_log_probs
    return _ESTIMATORS[kind](difference)


def _k3(difference: Tensor) -> Tensor:
    x = torch.clamp(-difference, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return torch.clamp(torch.exp(x) - x - 1, -K3_BOUND, K3_BOUND)


_ESTIMATORS = {"k1": lambda d: d, "k2": lambda d: d.square() / 2, "k3": _k3}
