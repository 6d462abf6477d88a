"""Tensors put together from excerpts of others, of which ranges are read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from rlhf.models.hf.source import Contents, TensorInfo, cut

ROWS_BYTES = 16 << 20
"""Bytes of whole rows that are read at a time where only some of their columns are wanted."""


class Readable(Protocol):
    """Tensor whose flattened (row-major) elements are read in ranges, 1-D."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of the elements."""
        ...

    def read(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop)."""
        ...


class Excerpt(NamedTuple):
    """Elements [start, stop) of a tensor."""

    tensor: Readable
    start: int
    stop: int


@dataclass(frozen=True)
class Beside:
    """Matrices of `columns` columns each side by side, as column parallel ranks hold one."""

    matrices: Sequence[Readable]
    columns: int

    @property
    def dtype(self) -> torch.dtype:
        """See `Readable`."""
        return self.matrices[0].dtype

    def read(self, start: int, stop: int) -> Tensor:
        """See `Readable`."""
        width = self.columns * len(self.matrices)
        first, last = start // width, -(-stop // width)
        parts = [matrix.read(first * self.columns, last * self.columns) for matrix in self.matrices]
        rows = torch.cat([part.view(-1, self.columns) for part in parts], dim=1).view(-1)
        return rows[start - first * width : stop - first * width]


@dataclass(frozen=True)
class SomeColumns:
    """Columns [first, first + columns) of a matrix of `width` columns."""

    matrix: Readable
    width: int
    first: int
    columns: int

    @property
    def dtype(self) -> torch.dtype:
        """See `Readable`."""
        return self.matrix.dtype

    def read(self, start: int, stop: int) -> Tensor:
        """See `Readable`."""
        first, last = start // self.columns, -(-stop // self.columns)
        chosen = torch.empty(last - first, self.columns, dtype=self.dtype)
        step = max(1, ROWS_BYTES // (self.width * self.dtype.itemsize))
        for row in range(first, last, step):
            end = min(last, row + step)
            rows = self.matrix.read(row * self.width, end * self.width).view(-1, self.width)
            chosen[row - first : end - first] = rows[:, self.first : self.first + self.columns]
        return chosen.view(-1)[start - first * self.columns : stop - first * self.columns]


@dataclass(frozen=True)
class Zeros:
    """Zeros without end."""

    dtype: torch.dtype

    def read(self, start: int, stop: int) -> Tensor:
        """See `Readable`."""
        return torch.zeros(stop - start, dtype=self.dtype)


class ExcerptSource:
    """Checkpoint whose tensors are excerpts of others, one after the other."""

    def __init__(
        self,
        layout: str,
        shapes: Mapping[str, tuple[int, ...]],
        excerpts: Mapping[str, Sequence[Excerpt]],
        *,
        model_files: Path | None = None,
        absent: Sequence[str] = (),
    ) -> None:
        self.layout, self._excerpts = layout, excerpts
        tensors = {name: TensorInfo(shape, excerpts[name][0].tensor.dtype) for name, shape in shapes.items()}
        self.contents = Contents(tensors, model_files=model_files, absent=list(absent))

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """See `TensorSource.read`."""
        found = [tensor.read(first, last) for tensor, first, last in cut(self._excerpts[name], start, stop)]
        if len(found) == 1:
            return found[0]
        return torch.cat([torch.empty(0, dtype=self.contents.tensors[name].dtype), *found])

    def close(self) -> None:
        """See `TensorSource.close`. No file is open between reads."""
