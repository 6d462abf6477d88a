"""Open checkpoint as a table of tensors, each read in its own way."""

from collections.abc import Mapping

from torch import Tensor

from rlhf.models.hf.source import Contents, ReadableTensor

MOMENTS = ("exp_avg", "exp_avg_sq")


class Unmapped(Exception):
    """The state of an optimizer cannot be told apart by parameter; the message says why."""


class NamedTensors:
    """A TensorSource of such tensors: the model's and the optimizer's, whose names in `contents` they give."""

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
        """See `TensorSource.read`."""
        return self._tensors[name].read(start, stop)

    def close(self) -> None:
        """See `TensorSource.close`; files are open only while they are read."""
