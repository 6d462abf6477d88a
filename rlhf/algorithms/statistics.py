"""Tensors with a mask, and their statistics over all ranks."""

from collections.abc import Callable

import torch
from torch import Tensor

WHITEN_EPSILON = 1e-8


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """`values` with zeros outside the mask, of the same shape; nothing outside is read, and the gradient there is
    exactly zero."""
    return torch.where(mask.bool(), values, 0.0)


def masked_whiten(values: Tensor, mask: Tensor, all_sum: Callable[[Tensor], Tensor]) -> Tensor:
    """Values with mean 0 and variance 1 over the masked entries of all ranks: (v - mean) * rsqrt(var + 1e-8), variance
    unbiased.

    Args:
        values: [N, R].
        mask: [N, R], 1 on the entries that count.
        all_sum: sums a small float64 tensor over ranks; called twice, so every rank must call this function.

    Returns:
        [N, R] float64, zero outside the mask. A single entry over all ranks becomes 0.
    """
    inside = masked(values, mask).double()
    total, count = all_sum(torch.stack([inside.sum(), mask.bool().sum().double()])).unbind()
    # The variance from the mean of all ranks, not from a sum of squares: that one cancels when the mean is large.
    centred = masked(inside - total / count, mask)
    variance = all_sum(centred.square().sum()) / (count - 1).clamp(min=1)
    return centred * torch.rsqrt(variance + WHITEN_EPSILON)


def backward_sum(values: Tensor, decays: Tensor) -> Tensor:
    """y[:, t] = values[:, t] + decays[:, t] * y[:, t + 1] with zero behind the last column; [N, R] each.

    Decays are within [0, 1]. In log2(R) passes over whole tensors: in pass k, y[:, t] takes up the 2^k columns behind
    those it holds.
    """
    span, length = 1, values.shape[1]
    while span < length:
        behind = torch.nn.functional.pad(torch.stack([values, decays])[..., span:], (0, span))
        values, decays = values + decays * behind[0], decays * behind[1]
        span *= 2
    return values
