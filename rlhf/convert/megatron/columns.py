"""Joins and cuts matrices by columns, as tensor parallel ranks store them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf.models.hf.source import FunctionTensor, ReadableTensor, TensorInfo

ROWS_BYTES = 16 << 20
"""If only some columns are used, read at most this many bytes of whole rows at once."""


def joined_columns(matrices: Sequence[ReadableTensor]) -> FunctionTensor:
    """Return matrices of equal shape side by side: one matrix per tensor parallel rank."""
    (rows, columns), dtype = matrices[0].info.shape, matrices[0].info.dtype
    width = columns * len(matrices)

    def read(start: int, stop: int) -> Tensor:
        first, last = start // width, -(-stop // width)
        parts = [matrix.read(first * columns, last * columns).view(-1, columns) for matrix in matrices]
        return torch.cat(parts, dim=1).view(-1)[start - first * width : stop - first * width]

    return FunctionTensor(TensorInfo((rows, width), dtype), read)


def column_slice(matrix: ReadableTensor, begin: int, columns: int) -> FunctionTensor:
    """Return the columns [begin, begin + columns) of a matrix."""
    (rows, width), dtype = matrix.info.shape, matrix.info.dtype
    step = max(1, ROWS_BYTES // (width * dtype.itemsize))

    def read(start: int, stop: int) -> Tensor:
        first, last = start // columns, -(-stop // columns)
        chosen = torch.empty(last - first, columns, dtype=dtype)
        for row in range(first, last, step):
            end = min(last, row + step)
            whole = matrix.read(row * width, end * width).view(-1, width)
            chosen[row - first : end - first] = whole[:, begin : begin + columns]
        return chosen.view(-1)[start - first * columns : stop - first * columns]

    return FunctionTensor(TensorInfo((rows, columns), dtype), read)
