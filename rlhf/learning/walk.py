"""Walk over this rank's micro-batches of a step, in lockstep with the other ranks'."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from rlhf.batch import Batch
from rlhf.learning.spread import Spread
from rlhf.models.packing import is_packed
from rlhf.ranks import dims


def per_token(
    batch: Batch, spread: Spread, budget: int, model: nn.Module, compute: Callable[[Batch], Tensor]
) -> Tensor:
    """Values per response token of all of `batch`, [N, R] float32, zero on padding, from passes over micro-batches.

    `compute` makes [n, R] of each micro-batch of n samples.
    Every rank makes as many passes, of at most `budget` tokens each; one that has no more samples gets no rows, and a
    batch that adds nothing (`Batch.micro_batch`).
    """
    result = torch.zeros_like(batch.rollout_log_probs)
    for rows in spread.micro_batches(budget, padded=not is_packed(model))[dims.data().rank]:
        values = compute(batch.micro_batch(rows))
        places = torch.tensor(rows, dtype=torch.int64, device=result.device)
        result[places, : values.shape[1]] = values
    return result


def mini_batch_plans(spread: Spread, budget: int, *, padded: bool) -> list[list[list[int]]]:
    """This rank's rows by [mini-batch][micro-batch], at most `budget` tokens each; every rank has as many."""
    rank = dims.data().rank
    return [
        spread.micro_batches(budget, padded=padded, mini_batch=mini_batch)[rank]
        for mini_batch in range(spread.mini_batches)
    ]
