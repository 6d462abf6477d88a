"""Walk over this rank's micro-batches of a step, in lockstep with the other ranks'."""

from collections.abc import Iterator

import torch
from torch import Tensor

from rlhf.batch import Batch
from rlhf.learning.spread import Spread
from rlhf.ranks import dims


def walk(batch: Batch, spread: Spread, budget: int, *, padded: bool) -> Iterator[tuple[Tensor, Batch]]:
    """Rows and batch of each micro-batch of the whole step, at most `budget` tokens each. Every rank has as many; one
    that has no more samples gets no rows, and a batch that adds nothing (`Batch.micro_batch`)."""
    for rows in spread.micro_batches(budget, padded=padded)[dims.data().rank]:
        yield torch.tensor(rows, dtype=torch.int64, device=batch.input_ids.device), batch.micro_batch(rows)


def mini_batch_plans(spread: Spread, budget: int, *, padded: bool) -> list[list[list[int]]]:
    """This rank's rows by [mini-batch][micro-batch], at most `budget` tokens each; every rank has as many."""
    rank = dims.data().rank
    return [
        spread.micro_batches(budget, padded=padded, mini_batch=mini_batch)[rank]
        for mini_batch in range(spread.mini_batches)
    ]
