"""Finds the response tokens of a micro-batch and the positions at which a model predicts them, packed or padded."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from rlhf.batch import Batch
from rlhf.models.packing import lay_out


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
    """[N, R] float32: the response mask of the micro-batch."""
    places: tuple[Tensor, Tensor]
    """[M] each: rows and columns of the tokens in the mask."""

    @classmethod
    def of(cls, model: nn.Module, batch: Batch) -> "PredictedTokens":
        ids = batch.input_ids.long()
        packed = lay_out(model, ids, batch.prompt_lengths + batch.response_lengths)
        mask = batch.response_mask
        rows, columns = mask.nonzero(as_tuple=True)
        sequence_positions = batch.prompt_lengths[rows] + columns
        labels = ids[rows, sequence_positions]
        return cls(packed.inputs, packed.starts[rows] + sequence_positions - 1, labels, mask, (rows, columns))

    def in_rows(self, values: Tensor) -> Tensor:
        """Return [N, R] with the values of [M] at the tokens' places, zero elsewhere."""
        return values.new_zeros(self.mask.shape).index_put(self.places, values)
