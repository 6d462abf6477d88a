"""Encodes the shards of tensors as the rows of an index, and checks that shards cover the tensors. Imports no torch.

A row is three int64. (tensor, start, stop) is a range of the flattened tensor. Most shards are ranges: FSDP's rows,
ZeRO's partitions, whole tensors. A box has consecutive rows (-1 - tensor, start, stop), one for each dimension. The
number `tensor` is the position of the tensor's name among all names, sorted.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlhf.storage.boxes import Box, boxes_of, range_box, strides_of

ROW_BYTES = 24
_ROW = np.dtype("<i8")
_AT_A_TIME = 256
"""One NumPy operation compares this many boxes with all boxes."""
Rows = NDArray[np.int64]
"""[n, 3] rows of an index."""
Tensors = Mapping[str, tuple[str, tuple[int, ...]]]
"""Tensor name -> type and shape."""


def rows_of(numbered: Iterable[tuple[int, Box]]) -> bytes:
    """Return the bytes of the rows of parts, each a tensor's number and a box as `boxes.normalize` returns it."""
    rows: list[tuple[int, int, int]] = []
    for tensor, box in numbered:
        number = tensor if box.is_range else -1 - tensor
        rows += ((number, start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))
    return np.array(rows, dtype=_ROW).tobytes()


def as_rows(content: bytes | bytearray) -> Rows:
    """Return the rows in the bytes of an index, as a view."""
    return np.frombuffer(content, dtype=_ROW).reshape(-1, 3)


class Table:
    """Names, shapes, sizes and strides of the tensors as arrays, in the order of their names."""

    def __init__(self, tensors: Tensors) -> None:
        self.names = sorted(tensors)
        self.shapes = [tensors[name][1] for name in self.names]
        self.sizes = np.array([math.prod(shape) for shape in self.shapes], dtype=np.int64)
        self.ndim = np.array([len(shape) for shape in self.shapes], dtype=np.int64)
        most = int(self.ndim.max(initial=0))
        self.dims = np.zeros((len(self.shapes), most), dtype=np.int64)
        self.strides = np.zeros_like(self.dims)
        for i, shape in enumerate(self.shapes):
            self.dims[i, : len(shape)], self.strides[i, : len(shape)] = shape, strides_of(shape)


class Parts(NamedTuple):
    """Shards parsed from rows. All arrays but `rows` have one entry per shard.

    `tensor` is the number of the tensor. `first` is the position of the shard's first element in the flattened tensor,
    `stop` the position after its last. `numel` is the number of elements, and `row` the index of the shard's first row.
    """

    rows: Rows
    tensor: NDArray[np.int64]
    first: NDArray[np.int64]
    stop: NDArray[np.int64]
    numel: NDArray[np.int64]
    row: NDArray[np.intp]

    @property
    def boxed(self) -> NDArray[np.bool_]:
        """[shards] bool: whether the shard is a box instead of a range."""
        return self.rows[self.row, 0] < 0

    def box(self, i: int, table: Table) -> Box:
        """Return shard `i` as a box of its tensor."""
        if not self.rows[self.row[i], 0] < 0:
            return range_box(int(self.first[i]), int(self.stop[i]))
        begin = self.row[i]
        starts, stops = self.rows[begin : begin + len(table.shapes[self.tensor[i]]), 1:].T.tolist()
        return Box(tuple(starts), tuple(stop - start for start, stop in zip(starts, stops, strict=True)))


def parse_rows(rows: Rows, table: Table) -> Parts:
    """Parse `rows`; raise ValueError for an unknown tensor, a row outside its tensor, or a box without a dimension."""
    number, start, stop = rows.T
    boxed = number < 0
    tensor = np.where(boxed, -1 - number, number) if boxed.any() else number
    if len(rows) and tensor.max() >= len(table.shapes):
        raise ValueError("rows of unknown tensors")
    if tensor is number:
        _check_inside(rows, tensor, table.sizes[tensor], table)
        return Parts(rows, tensor, start, stop, stop - start, np.arange(len(rows)))
    dimension = _dimensions(number, np.where(boxed, table.ndim[tensor], 1))
    _check_inside(rows, tensor, np.where(boxed, table.dims[tensor, dimension], table.sizes[tensor]), table)
    first_rows = np.flatnonzero(dimension == 0)
    # The first and the last element of a box in the flattened tensor: sums over its rows of index times stride.
    step = np.where(boxed, table.strides[tensor, dimension], 1)
    firsts, lasts = (np.add.reduceat(value * step, first_rows) for value in (start, stop - 1))
    return Parts(
        rows, tensor[first_rows], firsts, lasts + 1, np.multiply.reduceat(stop - start, first_rows), first_rows
    )


def _check_inside(rows: Rows, tensor: NDArray[np.int64], limit: NDArray[np.int64], table: Table) -> None:
    _, start, stop = rows.T
    if len(wrong := np.flatnonzero((start < 0) | (start >= stop) | (stop > limit))):
        number, shown = tensor[wrong[0]], rows[wrong[0], 1:].tolist()
        raise ValueError(f"shards of {table.names[number]} outside its {table.sizes[number]} elements: {shown}")


def _dimensions(number: NDArray[np.int64], ndim: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the dimension of each row within its shard. `number` is the first column of the rows; `ndim` is the number
    of rows of each row's shard: the dimensions of a box, 1 for a range."""
    at = np.arange(len(number))
    begins = np.diff(number, prepend=number[0] - 1) != 0
    dimension = (at - np.maximum.accumulate(np.where(begins, at, 0))) % np.maximum(ndim, 1)
    ends = np.diff(number, append=number[-1] - 1) != 0
    if (ndim[number < 0] < 2).any() or (dimension[ends] != ndim[ends] - 1).any():
        raise ValueError("boxes that lack a dimension")
    return dimension


def find_uncovered(parts: Parts, table: Table) -> int | None:
    """Return the number of a tensor that the parts do not cover exactly once; None if they cover all tensors once."""
    if len(parts.row) == len(parts.rows):  # with one row per shard, no shard is a box
        return find_uncovered_range(parts.rows, table.sizes)
    with_boxes = np.zeros(len(table.shapes), dtype=bool)
    with_boxes[parts.tensor[parts.boxed]] = True
    flat = ~with_boxes[parts.tensor]
    ranges = np.stack([parts.tensor, parts.first, parts.stop], axis=1)[flat]
    if (wrong := find_uncovered_range(ranges, np.where(with_boxes, 0, table.sizes))) is not None:
        return wrong
    seen: set[tuple[object, ...]] = set()  # many layers are cut alike: check each cut once
    for number, members in _by_tensor(parts.tensor, np.flatnonzero(~flat)):
        boxes = [parts.box(i, table) for i in members]
        if (key := (table.shapes[number], *boxes)) not in seen and not covers(boxes, table.shapes[number]):
            return number
        seen.add(key)
    return None


def _by_tensor(tensor: NDArray[np.int64], which: NDArray[np.intp]) -> Iterator[tuple[int, list[int]]]:
    """Group the shards `which` by tensor: return pairs of a tensor's number and the indices of its shards."""
    found = which[np.argsort(tensor[which], kind="stable")].tolist()
    return ((int(number), list(members)) for number, members in groupby(found, key=lambda i: tensor[i]))


def find_uncovered_range(ranges: Rows, sizes: NDArray[np.int64], first: NDArray[np.int64] | None = None) -> int | None:
    """Return the number of a tensor whose wanted elements the `ranges` do not cover exactly once, or None. `ranges` are
    [n, 3] (tensor, start, stop). Of each tensor, `sizes` [tensors] elements are wanted, from element `first` [tensors]
    on (None: from 0)."""
    first = np.zeros_like(sizes) if first is None else first
    ranges = ranges[np.lexsort((ranges[:, 1], ranges[:, 0]))]
    number, start, stop = ranges.T
    begins = np.diff(number, prepend=-1) != 0
    wrong = start != np.where(begins, first[number], np.roll(stop, 1))
    wrong |= np.diff(number, append=-1).astype(bool) & (stop != (first + sizes)[number])
    missing = sizes.astype(bool)
    missing[number] = False
    bad = np.concatenate([number[wrong], np.flatnonzero(missing)])
    return int(bad[0]) if len(bad) else None


def covers(parts: Sequence[Box], shape: Sequence[int], numel: int | None = None) -> bool:
    """Return whether parts of a tensor have `numel` elements together (None: all of `shape`) and do not overlap."""
    if sum(part.numel for part in parts) != (math.prod(shape) if numel is None else numel):
        return False
    boxes = [box for part in parts for box in boxes_of(part, shape)]
    low = np.array([box.offsets for box in boxes], dtype=np.int64)
    high = low + np.array([box.sizes for box in boxes], dtype=np.int64)
    for begin in range(0, len(boxes), _AT_A_TIME):
        some = slice(begin, begin + _AT_A_TIME)
        common = np.minimum(high[some, None], high) > np.maximum(low[some, None], low)
        if int(common.all(axis=-1).sum()) > len(low[some]):  # more overlaps than each box with itself
            return False
    return True
