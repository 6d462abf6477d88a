"""Serves an open checkpoint as a table of named tensors."""

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from rlhf.models.hf.source import Contents, ReadableTensor, TrainedSoFar

MOMENTS = ("exp_avg", "exp_avg_sq")


class Unmapped(Exception):
    """The optimizer's state cannot be matched to parameters; the message gives the reason."""


def with_updates(progress: TrainedSoFar, moments: Mapping[str, ReadableTensor]) -> TrainedSoFar:
    """Return `progress` with the largest step count among the moments as the updates of the weights."""
    steps = [tensor.read(0, 1).item() for name, tensor in moments.items() if name.endswith(".step")]
    return replace(progress, optimizer_steps=int(max(steps, default=0)))


class NamedTensors:
    """A `TensorSource` of `ReadableTensor`s; fills in `contents.tensors` and `contents.moments`."""

    def __init__(
        self,
        layout: str,
        tensors: Mapping[str, ReadableTensor],
        moments: Mapping[str, ReadableTensor],
        contents: Contents,
    ) -> None:
        self.layout, self.contents = layout, contents
        self._tensors = {**tensors, **moments}
        contents.tensors = {name: tensor.info for name, tensor in tensors.items()}
        contents.moments = {name: tensor.info for name, tensor in moments.items()}

    def read(self, name: str, start: int, stop: int) -> Tensor:
        return self._tensors[name].read(start, stop)

    def close(self) -> None:
        """See `TensorSource.close`; files are open only during a read."""
