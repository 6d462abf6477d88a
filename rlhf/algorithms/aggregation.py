"""From token losses to one number, as a sum here over a denominator everywhere: independent of padding, micro-batches and ranks."""

import torch
from torch import Tensor


def loss_sum(values: Tensor, mask: Tensor, mode: str) -> Tensor:
    """The numerator of the aggregate over these rows; add it up over micro-batches and ranks.

    Args:
        values: [batch, tokens]; what lies outside the mask is ignored, NaN included.
        mask: [batch, tokens], 1 on response tokens. A row may be empty.
        mode: `token-mean`, `seq-mean-token-sum` or `seq-mean-token-mean` (verl's names).
    """
    masked = torch.where(mask.bool(), values, 0.0)
    if mode == "seq-mean-token-mean":
        return (masked.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).sum()
    return masked.sum()


def loss_count(mask: Tensor, mode: str) -> Tensor:
    """The denominator of the aggregate that these rows contribute: their tokens, or the number of rows that have any."""
    return mask.sum() if mode == "token-mean" else (mask.sum(dim=1) > 0).sum()
