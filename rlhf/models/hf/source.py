"""Interface of a layout: any tool's checkpoint as named tensors that are read in ranges. Imports no torch."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class TensorInfo:
    """Shape and type of a whole tensor, before sharding."""

    shape: tuple[int, ...]
    dtype: "torch.dtype"

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Origin:
    """A checkpoint folder of any tool, with the user's options.

    model_files: Hugging Face folder with config and tokenizer, for layouts without them (`--hf_model_path`).
    role: model to read from a checkpoint with several (`actor`, `critic`).
    tag: name of one save in the folder, for layouts with several saves (DeepSpeed).
    adapter: `keep` or `merge` a peft adapter (`--adapter`); if unset, a checkpoint with an adapter is an error.
    parts: more folders of the same checkpoint, from disks of other nodes, for layouts that allow them.
    """

    path: Path
    model_files: Path | None = None
    role: str = "actor"
    tag: str | None = None
    adapter: str | None = None
    parts: tuple[Path, ...] = ()


@dataclass(frozen=True)
class TrainedSoFar:
    """Progress of the run that wrote a checkpoint; a field is None if the checkpoint does not record it.

    step: training steps, as the tool counts them.
    optimizer_steps: updates of the weights.
    schedule: state of the learning rate schedule with torch's names (`last_epoch`, `base_lrs`).
    """

    step: int | None = None
    optimizer_steps: int | None = None
    schedule: Mapping[str, Any] | None = None


@dataclass
class Contents:
    """Contents of a checkpoint.

    tensors: the model's tensors by their names in transformers; tied copies may be missing.
    moments: the optimizer's `NAME.exp_avg`, `NAME.exp_avg_sq` (of NAME's shape) and `NAME.step` (a scalar) for the
        parameter NAME; empty if the checkpoint has none.
    model_files: folder with config.json, tokenizer and chat template, if known.
    adapter: content of adapter_config.json if `tensors` are an adapter's, by peft's names.
    absent: state that a run needs and the checkpoint lacks, one line each.
    """

    tensors: dict[str, TensorInfo]
    moments: dict[str, TensorInfo] = field(default_factory=dict)
    progress: TrainedSoFar = field(default_factory=TrainedSoFar)
    model_files: Path | None = None
    adapter: Mapping[str, Any] | None = None
    absent: list[str] = field(default_factory=list)


class TensorSource(Protocol):
    """An open checkpoint; has at most one tensor, or one rank's mapped file, in memory."""

    layout: str  # name of the layout in `--backend`

    @property
    def contents(self) -> Contents: ...

    def read(self, name: str, start: int, stop: int) -> "Tensor":
        """Return elements [start, stop) of the flattened (row-major) tensor or moment `name`.

        The result is 1-D, contiguous, on the CPU, and has the stored type. Raises DamagedCheckpoint if the elements
        cannot be read.
        """
        ...

    def close(self) -> None: ...


class ReadableTensor(Protocol):
    """A tensor that is read in ranges."""

    @property
    def info(self) -> TensorInfo: ...

    def read(self, start: int, stop: int) -> "Tensor":
        """Return elements [start, stop) of the flattened tensor, like `TensorSource.read`."""
        ...


@dataclass(frozen=True)
class SourceTensor:
    """A tensor of an open checkpoint."""

    source: TensorSource
    name: str

    @property
    def info(self) -> TensorInfo:
        return self.source.contents.tensors.get(self.name) or self.source.contents.moments[self.name]

    def read(self, start: int, stop: int) -> "Tensor":
        return self.source.read(self.name, start, stop)


@dataclass(frozen=True)
class FunctionTensor:
    """A `ReadableTensor` that a function reads."""

    info: TensorInfo
    read: "Callable[[int, int], Tensor]"


def tensors_of(source: TensorSource) -> dict[str, ReadableTensor]:
    """Return the tensors of an open checkpoint, without its moments."""
    return {name: SourceTensor(source, name) for name in source.contents.tensors}


def cut(pieces: Sequence[tuple[T, int, int]], start: int, stop: int) -> list[tuple[T, int, int]]:
    """Return elements [start, stop) of the concatenated `pieces` (source, first element, end), as pieces."""
    found, at = [], 0
    for tensor, first, last in pieces:
        begin, end = max(start, at), min(stop, at + last - first)
        if begin < end:
            found.append((tensor, first + begin - at, first + end - at))
        at += last - first
    return found
