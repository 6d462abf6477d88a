"""Assembles tensors from slices of other tensors and reads them in ranges."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from rlhf.models.hf.source import Contents, TensorInfo, cut

ROWS_BYTES = 16 << 20
"""Bytes of whole rows that are read at once where only some columns are used."""


class Readable(Protocol):
    """A tensor whose flattened (row-major) elements are read in ranges, as 1-D tensors."""

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self, start: int, stop: int) -> Tensor:
        """Return the elements [start, stop)."""
        ...


class TensorSlice(NamedTuple):
    """Elements [start, stop) of a tensor."""

    tensor: Readable
    start: int
    stop: int


@dataclass(frozen=True)
class JoinedColumns:
    """A `Readable` that joins matrices of `columns` columns each side by side: one matrix per tensor parallel rank."""

    matrices: Sequence[Readable]
    columns: int

    @property
    def dtype(self) -> torch.dtype:
        return self.matrices[0].dtype

    def read(self, start: int, stop: int) -> Tensor:
        width = self.columns * len(self.matrices)
        first, last = start // width, -(-stop // width)
        parts = [matrix.read(first * self.columns, last * self.columns) for matrix in self.matrices]
        rows = torch.cat([part.view(-1, self.columns) for part in parts], dim=1).view(-1)
        return rows[start - first * width : stop - first * width]


@dataclass(frozen=True)
class ColumnSlice:
    """A `Readable` of the columns [first, first + columns) of a matrix with `width` columns."""

    matrix: Readable
    width: int
    first: int
    columns: int

    @property
    def dtype(self) -> torch.dtype:
        return self.matrix.dtype

    def read(self, start: int, stop: int) -> Tensor:
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
    """A `Readable` of zeros, of any length."""

    dtype: torch.dtype

    def read(self, start: int, stop: int) -> Tensor:
        return torch.zeros(stop - start, dtype=self.dtype)


class SlicedSource:
    """A `TensorSource` whose tensors are concatenated slices of other tensors."""

    def __init__(
        self,
        layout: str,
        shapes: Mapping[str, tuple[int, ...]],
        slices: Mapping[str, Sequence[TensorSlice]],
        *,
        model_files: Path | None = None,
        absent: Sequence[str] = (),
    ) -> None:
        self.layout, self._slices = layout, slices
        tensors = {name: TensorInfo(shape, slices[name][0].tensor.dtype) for name, shape in shapes.items()}
        self.contents = Contents(tensors, model_files=model_files, absent=list(absent))

    def read(self, name: str, start: int, stop: int) -> Tensor:
        found = [tensor.read(first, last) for tensor, first, last in cut(self._slices[name], start, stop)]
        if len(found) == 1:
            return found[0]
        return torch.cat([torch.empty(0, dtype=self.contents.tensors[name].dtype), *found])

    def close(self) -> None:
        """See `TensorSource.close`; no file is open between reads."""
