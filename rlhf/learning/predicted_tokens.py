"""Computes values of response tokens, and finds the positions at which a model predicts them, packed or padded."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rlhf.batch import Batch
from rlhf.learning.balancing import SampleBalance
from rlhf.models.packing import is_packed, lay_out
from rlhf.ranks import dims


@dataclass(frozen=True)
class PredictedTokens:
    """The M tokens in the response mask of a micro-batch of N samples, in the order of its rows."""

    inputs: dict[str, Any]
    """Arguments of the model's forward."""
    positions: Tensor
    """[M] int64: position that predicts each token, in the model's output flattened over rows."""
    labels: Tensor
    """[M] int64: token ids."""
    mask: Tensor
    """[N, R] bool: the response mask of the micro-batch."""
    places: tuple[Tensor, Tensor]
    """[M] each: rows and columns of the tokens in the mask."""

    @classmethod
    def of(cls, model: nn.Module, batch: Batch) -> "PredictedTokens":
        ids, mask, sizes = batch.input_ids.long(), batch.response_mask, batch.sizes
        packed = lay_out(model, ids, sizes[0] + sizes[1])
        # `nonzero` would make the host wait until the device has counted the tokens.
        rows, columns = torch.nonzero_static(mask, size=int(sizes[2].sum())).unbind(1)
        sequence_positions = batch.prompt_lengths[rows] + columns
        labels = ids[rows, sequence_positions]
        return cls(packed.inputs, packed.starts[rows] + sequence_positions - 1, labels, mask, (rows, columns))

    def in_rows(self, values: Tensor) -> Tensor:
        """Return `values`, [M], at the places of their tokens in [N, R]; zero elsewhere."""
        return values.new_zeros(self.mask.shape).index_put(self.places, values)


def per_token(
    batch: Batch, balance: SampleBalance, budget: int, model: nn.Module, compute: Callable[[Batch], Tensor]
) -> Tensor:
    """Return the values of `compute` for all response tokens of `batch`, [N, R] float32, zero elsewhere. Collective.

    `compute` returns [n, R'] for a micro-batch of n samples with at most `budget` tokens. Every rank runs the same
    number of passes. A rank that has no samples left computes on the filler of `Batch.micro_batch`.
    """
    result = torch.zeros_like(batch.rollout_log_probs)
    for rows in balance.micro_batches(budget, padded=not is_packed(model))[dims.data().rank]:
        values = compute(batch.micro_batch(rows))
        places = torch.tensor(rows, dtype=torch.int64).to(result.device, non_blocking=True)
        result[places, : values.shape[1]] = values
    return result
