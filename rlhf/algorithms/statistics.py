"""Masks tensors and computes their statistics over all ranks."""

from collections.abc import Callable

import torch
from torch import Tensor

WHITEN_EPSILON = 1e-8


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """Return `values` with zeros outside the mask, even in place of NaN. The gradient there is exactly zero."""
    return torch.where(mask.bool(), values, 0.0)


def masked_whiten(values: Tensor, mask: Tensor, all_sum: Callable[[Tensor], Tensor]) -> Tensor:
    """Whiten the entries in the mask over all ranks: (v - mean) * rsqrt(var + 1e-8), with unbiased variance.

    Return [N, R] float64, zero outside the mask. If all masks together have only one entry, it becomes 0. Every
    rank must call this function, because it calls `all_sum` twice.
    """
    inside = masked(values, mask).double()
    total, count = all_sum(torch.stack([inside.sum(), mask.bool().sum().double()])).unbind()
    # Centre before squaring: a variance from the sum of squares loses precision by cancellation when the mean is large.
    centered = masked(inside - total / count, mask)
    variance = all_sum(centered.square().sum()) / (count - 1).clamp(min=1)
    return centered * torch.rsqrt(variance + WHITEN_EPSILON)


def backward_sum(values: Tensor, decays: Tensor) -> Tensor:
    """Return y with y[:, t] = values[:, t] + decays[:, t] * y[:, t + 1], and zero after the last column; [N, R] each.

    Decays are within [0, 1]. The scan takes log2(R) passes over whole tensors: pass k adds the next 2^k columns to
    y[:, t].
    """
    span, length = 1, values.shape[1]
    while span < length:
        behind = torch.nn.functional.pad(torch.stack([values, decays])[..., span:], (0, span))
        values, decays = values + decays * behind[0], decays * behind[1]
        span *= 2
    return values
