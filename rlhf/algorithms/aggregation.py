"""Aggregates token losses as a local sum over a global denominator, independent of padding, batching and ranks."""

from torch import Tensor

from rlhf.algorithms.statistics import masked


def loss_sum(values: Tensor, mask: Tensor, mode: str, scale_factor: float = 1) -> Tensor:
    """Return these rows' part of the aggregate's numerator, to be summed over micro-batches and ranks.

    Args:
        values: [N, R]; values outside the mask are ignored, NaN included.
        mask: [N, R], 1 on response tokens. Rows may be empty.
        mode: `token-mean`, `seq-mean-token-sum`, `seq-mean-token-mean` or `seq-mean-token-sum-norm` (verl's names).
        scale_factor: the fixed length that `seq-mean-token-sum-norm` divides by; other modes ignore it.

    Source: DAPO (arXiv 2503.14476) section 3.3 for `token-mean`; DeepSeekMath (arXiv 2402.03300) equation 3 for
    `seq-mean-token-mean`; Dr.GRPO (arXiv 2503.20783) section 3.2 for the fixed length.
    """
    inside = masked(values, mask)
    if mode == "seq-mean-token-mean":
        return (inside.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).sum()
    return inside.sum() / scale_factor if mode == "seq-mean-token-sum-norm" else inside.sum()


def loss_count(mask: Tensor, mode: str) -> Tensor:
    """Return these rows' part of the aggregate's denominator: their tokens, or the number of rows with tokens."""
    return mask.sum() if mode == "token-mean" else (mask.sum(dim=1) > 0).sum()
