"""Open checkpoint as a table of tensors, each read in its own way."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from rlhf.checkpoint.interop.source import Contents, TensorInfo, TensorSource
from rlhf.checkpoint.interop.stored_tensor import StoredTensor

MOMENTS = ("exp_avg", "exp_avg_sq")


class Unmapped(Exception):
    """The state of an optimizer cannot be told apart by parameter; the message says why."""


class ReadableTensor(Protocol):
    """Tensor somewhere on disk."""

    @property
    def info(self) -> TensorInfo:
        """Shape and type of the whole."""
        ...

    def read(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of it, flattened, as `TensorSource.read` gives them."""
        ...


@dataclass(frozen=True)
class SourceTensor:
    """Tensor of another open checkpoint."""

    source: TensorSource
    name: str

    @property
    def info(self) -> TensorInfo:
        """See `ReadableTensor.info`."""
        return self.source.contents.tensors.get(self.name) or self.source.contents.moments[self.name]

    def read(self, start: int, stop: int) -> Tensor:
        """See `ReadableTensor.read`."""
        return self.source.read(self.name, start, stop)


@dataclass(frozen=True)
class InFile:
    """Tensor that is whole in one file."""

    stored: StoredTensor

    @property
    def info(self) -> TensorInfo:
        """See `ReadableTensor.info`."""
        return TensorInfo(self.stored.shape, self.stored.dtype)

    def read(self, start: int, stop: int) -> Tensor:
        """See `ReadableTensor.read`."""
        return self.stored.read(start, stop)


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
