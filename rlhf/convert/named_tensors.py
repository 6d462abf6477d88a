"""Serves an open checkpoint as a table of named tensors."""

from collections.abc import Mapping

from torch import Tensor

from rlhf.models.hf.source import Contents, ReadableTensor

MOMENTS = ("exp_avg", "exp_avg_sq")


class Unmapped(Exception):
    """The optimizer's state cannot be matched to parameters; the message gives the reason."""


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
