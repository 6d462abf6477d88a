"""Interface of a layout: a checkpoint of any tool as named tensors, of which ranges are read. Imports no torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class TensorInfo:
    """Shape and type of a whole tensor, before it was split over ranks."""

    shape: tuple[int, ...]
    dtype: "torch.dtype"

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Origin:
    """Folder of some tool, and what the user says about it.

    `model_files` is a Hugging Face folder with the model's config and tokenizer, for a layout that does not bring them
    (`--hf_model_path`); `role` chooses among the models of a checkpoint that has several (`actor`, `critic`); `tag` is
    the name of one save within the folder, for layouts that have such (DeepSpeed). `adapter` is what to do with a peft
    adapter (`--adapter`): `keep` it as one, or `merge` it into its base; a checkpoint with one is refused without it.
    `parts` are further folders with files of the same checkpoint, from disks of other nodes, for layouts that allow
    such.
    """

    path: Path
    model_files: Path | None = None
    role: str = "actor"
    tag: str | None = None
    adapter: str | None = None
    parts: tuple[Path, ...] = ()


@dataclass(frozen=True)
class TrainedSoFar:
    """Progress of the run that wrote a checkpoint, as far as the checkpoint says so.

    `step` counts what that tool calls a step, `optimizer_steps` updates of the weights; `schedule` is the state of its
    learning rate schedule, with the names that torch gives (`last_epoch`, `base_lrs`).
    """

    step: int | None = None
    optimizer_steps: int | None = None
    schedule: Mapping[str, Any] | None = None


@dataclass
class Contents:
    """Contents of a checkpoint: the model, the optimizer, and what it lacks.

    `tensors` has the model's by their names in transformers, tied ones once. `moments` has the optimizer's:
    `NAME.exp_avg`, `NAME.exp_avg_sq` (of NAME's shape) and `NAME.step` (a scalar) for the parameter NAME, and is empty
    when they are not there. `model_files` is the folder with config.json, tokenizer and chat template, `None` when
    nobody knows. `adapter` is the content of adapter_config.json when `tensors` are an adapter's instead, by the names
    that peft gives. `absent` says what a run of ours needs and this layout did not keep, a line each.
    """

    tensors: dict[str, TensorInfo]
    moments: dict[str, TensorInfo] = field(default_factory=dict)
    progress: TrainedSoFar = field(default_factory=TrainedSoFar)
    model_files: Path | None = None
    adapter: Mapping[str, Any] | None = None
    absent: list[str] = field(default_factory=list)


class TensorSource(Protocol):
    """One open checkpoint; holds at most one tensor, or one rank's mapped file, in memory."""

    layout: str
    """Its name as `--backend` takes it."""

    @property
    def contents(self) -> Contents:
        """Tensors, and what else there is."""
        ...

    def read(self, name: str, start: int, stop: int) -> "Tensor":
        """Elements [start, stop) of the flattened (row-major) tensor or moment `name`: 1-D, contiguous, on the CPU, in
        the stored type. Raises DamagedCheckpoint when they cannot be had."""
        ...

    def close(self) -> None:
        """Let go of its files."""
        ...


class ReadableTensor(Protocol):
    """Tensor somewhere on disk."""

    @property
    def info(self) -> TensorInfo:
        """Shape and type of the whole."""
        ...

    def read(self, start: int, stop: int) -> "Tensor":
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

    @property
    def dtype(self) -> "torch.dtype":
        """Type of the elements."""
        return self.info.dtype

    def read(self, start: int, stop: int) -> "Tensor":
        """See `ReadableTensor.read`."""
        return self.source.read(self.name, start, stop)


def cut(pieces: Sequence[tuple[T, int, int]], start: int, stop: int) -> list[tuple[T, int, int]]:
    """Elements [start, stop) of what `pieces` (something, first element, end) are one after the other."""
    found, at = [], 0
    for tensor, first, last in pieces:
        begin, end = max(start, at), min(stop, at + last - first)
        if begin < end:
            found.append((tensor, first + begin - at, first + end - at))
        at += last - first
    return found
