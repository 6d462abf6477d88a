"""Implements a tensor source over a test's tensors and moments in memory."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from rlhf.models.hf.source import Contents, TensorInfo, TrainedSoFar


class MemorySource:
    """Returns ranges of `tensors` and `moments`; `largest` is the size of the largest requested range."""

    layout = "memory"

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        moments: Mapping[str, Tensor] | None = None,
        progress: TrainedSoFar | None = None,
        model_files: Path | None = None,
        absent: list[str] | None = None,
    ) -> None:
        self._flat = {
            name: tensor.detach().reshape(-1) for name, tensor in (dict(tensors) | (dict(moments or {}))).items()
        }
        self.largest, self.closed = 0, False
        self.contents = Contents(
            _infos(tensors), _infos(moments or {}), progress or TrainedSoFar(), model_files, absent=absent or []
        )

    def read(self, name: str, start: int, stop: int) -> Tensor:
        self.largest = max(self.largest, stop - start)
        return self._flat[name][start:stop]

    def close(self) -> None:
        self.closed = True


def _infos(tensors: Mapping[str, Tensor]) -> dict[str, TensorInfo]:
    return {name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
