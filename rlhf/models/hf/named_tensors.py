"""Presents readable tensors as an open checkpoint; a tensor may consist of pieces of other tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf.models.hf.source import Contents, FunctionTensor, ReadableTensor, TensorInfo, cut

Piece = tuple[ReadableTensor, int, int]
"""Elements [start, stop) of a flattened tensor."""


@dataclass(frozen=True)
class JoinedTensor:
    """A tensor whose flattened elements are consecutive pieces of other tensors of the same dtype."""

    info: TensorInfo
    pieces: Sequence[Piece]

    def read(self, start: int, stop: int) -> Tensor:
        """See `ReadableTensor.read`."""
        parts = [tensor.read(first, last) for tensor, first, last in cut(self.pieces, start, stop)]
        return parts[0] if len(parts) == 1 else torch.cat([torch.empty(0, dtype=self.info.dtype), *parts])


def zeros(info: TensorInfo) -> FunctionTensor:
    return FunctionTensor(info, lambda start, stop: torch.zeros(stop - start, dtype=info.dtype))


class NamedTensors:
    """A `TensorSource` of tensors and moments by name; sets `contents.tensors` and `contents.moments`."""

    def __init__(
        self,
        layout: str,
        tensors: Mapping[str, ReadableTensor],
        moments: Mapping[str, ReadableTensor] | None = None,
        contents: Contents | None = None,
    ) -> None:
        moments = moments or {}
        self.layout, self.contents, self._tensors = layout, contents or Contents({}), {**tensors, **moments}
        self.contents.tensors = {name: tensor.info for name, tensor in tensors.items()}
        self.contents.moments = {name: tensor.info for name, tensor in moments.items()}

    def read(self, name: str, start: int, stop: int) -> Tensor:
        return self._tensors[name].read(start, stop)

    def close(self) -> None:
        """Do nothing: files are open only during a read."""
