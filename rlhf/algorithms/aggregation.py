"""Aggregation of token losses, a sum here over a denominator everywhere: independent of padding, batching and ranks."""

from torch import Tensor

from rlhf.algorithms.statistics import masked


def loss_sum(values: Tensor, mask: Tensor, mode: str, scale_factor: float = 1) -> Tensor:
    """The numerator of the aggregate over these rows; add it up over micro-batches and ranks.

    Args:
        values: [N, R]; what lies outside the mask is ignored, NaN included.
        mask: [N, R], 1 on response tokens. A row may be empty.
        mode: `token-mean`, `seq-mean-token-sum`, `seq-mean-token-mean` or `seq-mean-token-sum-norm` (verl's names).
        scale_factor: the fixed length that `seq-mean-token-sum-norm` divides by; the other modes don't read it.

    Source: DAPO (arXiv 2503.14476) section 3.3 for `token-mean`; DeepSeekMath (arXiv 2402.03300) equation 3 for
    `seq-mean-token-mean`; Dr.GRPO (arXiv 2503.20783) section 3.2 for the fixed length.
    """
    inside = masked(values, mask)
    if mode == "seq-mean-token-mean":
        return (inside.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).sum()
    return inside.sum() / scale_factor if mode == "seq-mean-token-sum-norm" else inside.sum()


def loss_count(mask: Tensor, mode: str) -> Tensor:
    """The denominator of the aggregate that these rows contribute: their tokens, or the number of rows that have
    any."""
    return mask.sum() if mode == "token-mean" else (mask.sum(dim=1) > 0).sum()
