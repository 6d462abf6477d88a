"""Reads a tensor whose parts are stored in several files.

The tensor is a matrix here: its rows are all dimensions but the last, flattened. A vector has one row per element. A
part is read as bands. A band is a block of consecutive rows and columns of the matrix.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Protocol

import torch
from torch import Tensor

from rlhf.models.hf.source import TensorInfo


class StoredPart(Protocol):
    """A part of a tensor in a file."""

    def read(self, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of the flattened part, 1-D."""
        ...


@dataclass(frozen=True)
class Band:
    """Rows [row, row + rows) and columns [column, column + columns) of a tensor. In the part `stored`, they
    begin at element `at`."""

    row: int
    rows: int
    column: int
    columns: int
    at: int
    stored: StoredPart


def bands_of(
    shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...], stored: StoredPart
) -> Iterator[Band]:
    """Yield the bands of a part of `sizes` that begins at `offsets` of a tensor of `shape`."""
    if len(shape) < 2:
        yield Band(sum(offsets), torch.Size(sizes).numel(), 0, 1, 0, stored)
        return
    outer, columns = shape[:-1], sizes[-1]
    # The rows of a band span dimension `split`, and the outer dimensions after it, which the part covers completely.
    split = len(outer) - 1
    while split > 0 and sizes[split] == shape[split]:
        split -= 1
    strides = [torch.Size(outer[axis + 1 :]).numel() for axis in range(len(outer))]
    rows = sizes[split] * strides[split]
    for number, index in enumerate(product(*(range(size) for size in sizes[:split]))):
        row = offsets[split] * strides[split]
        row += sum((offsets[axis] + index[axis]) * strides[axis] for axis in range(split))
        yield Band(row, rows, offsets[-1], columns, number * rows * columns, stored)


def runs_of(bands: list[Band], info: TensorInfo) -> tuple[TensorInfo, list[Band]]:
    """Return the tensor as a vector, with its bands, if each band is within one row; else return the arguments.

    Reading a vector needs less memory: `read_bands` allocates whole rows, and a row of a flattened tensor of Megatron
    is one rank's whole part of a weight.
    """
    if len(info.shape) < 2 or any(band.rows > 1 for band in bands):
        return info, bands
    width = info.shape[-1]
    runs = [Band(band.row * width + band.column, band.columns, 0, 1, band.at, band.stored) for band in bands]
    return TensorInfo((info.numel,), info.dtype), runs


def read_bands(bands: Iterable[Band], info: TensorInfo, start: int, stop: int) -> Tensor | None:
    """Return elements [start, stop) of the flattened tensor, 1-D; None unless each element is in exactly one band."""
    width = info.shape[-1] if len(info.shape) > 1 else 1
    first, last = (start // width, -(-stop // width)) if width else (0, 0)
    rows = torch.empty(last - first, width, dtype=info.dtype)
    there, filled = torch.zeros(rows.shape, dtype=torch.bool), 0
    for band in bands:
        begin, end = max(first, band.row), min(last, band.row + band.rows)
        if begin < end:
            at = band.at + (begin - band.row) * band.columns
            block = band.stored.read(at, at + (end - begin) * band.columns).view(-1, band.columns)
            place = slice(begin - first, end - first), slice(band.column, band.column + band.columns)
            rows[place], there[place] = block, True
            filled += block.numel()
    # The count alone would not show a missing part if other parts overlap.
    if filled != rows.numel() or not there.all():
        return None
    return rows.view(-1)[start - first * width : stop - first * width]
