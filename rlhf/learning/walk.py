"""Runs a function over this rank's micro-batches of a step, in lockstep with the other ranks."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from rlhf.batch import Batch
from rlhf.learning.balancing import SampleBalance
from rlhf.models.packing import is_packed
from rlhf.ranks import dims


def per_token(
    batch: Batch, balance: SampleBalance, budget: int, model: nn.Module, compute: Callable[[Batch], Tensor]
) -> Tensor:
    """Return the values of `compute` for every response token of `batch`, [N, R] float32, zero on padding. Collective.

    `compute` returns [n, R'] for a micro-batch of n samples with at most `budget` tokens. Every rank runs the same
    number of passes. A rank without samples left computes on the filler of `Batch.micro_batch`.
    """
    result = torch.zeros_like(batch.rollout_log_probs)
    for rows in balance.micro_batches(budget, padded=not is_packed(model))[dims.data().rank]:
        values = compute(batch.micro_batch(rows))
        places = torch.tensor(rows, dtype=torch.int64, device=result.device)
        result[places, : values.shape[1]] = values
    return result


def mini_batch_plans(balance: SampleBalance, budget: int, *, padded: bool) -> list[list[list[int]]]:
    """Return this rank's rows by [mini-batch][micro-batch].

    Every rank has the same number of micro-batches, of at most `budget` tokens each.
    """
    rank = dims.data().rank
    return [
        balance.micro_batches(budget, padded=padded, mini_batch=mini_batch)[rank]
        for mini_batch in range(balance.mini_batches)
    ]
