"""Describes parts of tensors by offsets and sizes. Imports no torch.

A part with one offset and size per dimension is a box: the tensor is cut by rows, columns or both. A part with
a single offset and size is a range of the flattened tensor, in row-major order.

ZeRO's partitions are ranges; as boxes, a range would be a list of up to 2 * ndim - 1 boxes. FSDP's rows are boxes and
also ranges; ranges take less space in an index.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Box(NamedTuple):
    """Elements [offset, offset + size) in each dimension of a tensor, or of the flattened tensor if there is one size.
    A part that is contiguous in the flattened tensor is always written as a range: see `normalize`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def is_range(self) -> bool:
        """Whether this is a range of the flattened tensor. Every box of a 1-D tensor is a range."""
        return len(self.sizes) == 1


class Strided(NamedTuple):
    """A strided view of 1-D memory: the offset of its first element, and its sizes and strides, all in elements."""

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def span(self) -> int:
        """Number of elements from the first to the last element, gaps included."""
        return 1 + sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True))

    @property
    def contiguous(self) -> bool:
        return self.span == math.prod(self.sizes)


def range_box(start: int, stop: int) -> Box:
    """Return the range of the elements [start, stop) of a flattened tensor."""
    return Box((start,), (stop - start,))


def whole_box(shape: Sequence[int]) -> Box:
    """Return the range of all elements of a tensor."""
    return range_box(0, math.prod(shape))


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a row-major tensor, in elements."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides[: len(shape)]))


def normalize(box: Box, shape: Sequence[int]) -> Box:
    """Return `box` as a range of the flattened tensor of `shape` if it is contiguous there or empty, else `box`."""
    if box.is_range:
        return box
    start = sum(offset * stride for offset, stride in zip(box.offsets, strides_of(shape), strict=True))
    if 0 in box.sizes:
        return range_box(start, start)
    inner = len(shape)
    while inner and box.sizes[inner - 1] == shape[inner - 1]:
        inner -= 1
    return range_box(start, start + box.numel) if math.prod(box.sizes[: max(inner - 1, 0)]) == 1 else box


def bounds(box: Box, shape: Sequence[int]) -> tuple[int, int]:
    """Return the smallest range [start, stop) of the flattened tensor that contains a non-empty part."""
    if box.is_range:
        return box.offsets[0], box.offsets[0] + box.sizes[0]
    layout = layout_of(box, whole_box(shape), shape)
    return layout.offset, layout.offset + layout.span


def boxes_of(part: Box, shape: Sequence[int]) -> list[Box]:
    """Return a part of a tensor of `shape` as boxes, at most 2 * ndim - 1, in row-major order; none if it is empty."""
    if not part.numel:
        return []
    if len(part.sizes) == len(shape) or not shape:
        return [part]
    start, stop, row = part.offsets[0], part.offsets[0] + part.sizes[0], math.prod(shape[1:])
    # Cut the range before its first and after its last whole row.
    edges = sorted({start, min(-(-start // row) * row, stop), max(stop // row * row, start), stop})
    found = []
    for low, high in pairwise(edges):
        number, inside = divmod(low, row)
        if inside or high - low < row:
            parts = boxes_of(range_box(inside, inside + high - low), shape[1:])
            found += [Box((number, *box.offsets), (1, *box.sizes)) for box in parts]
        else:
            zeros = (0,) * (len(shape) - 1)
            found.append(Box((number, *zeros), ((high - low) // row, *shape[1:])))
    return found


def overlaps(one: Box, other: Box, shape: Sequence[int]) -> Iterator[Box]:
    """Yield the intersection of two parts of a tensor, in row-major order: a range for two ranges, otherwise boxes."""
    ranges = one.is_range and other.is_range
    for a, b in [(one, other)] if ranges else product(boxes_of(one, shape), boxes_of(other, shape)):
        low = tuple(map(max, a.offsets, b.offsets))
        ends = (min(x + m, y + n) for x, m, y, n in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True))
        sizes = tuple(end - start for start, end in zip(low, ends, strict=True))
        if min(sizes) > 0:
            yield Box(low, sizes)


def layout_of(inner: Box, outer: Box, shape: Sequence[int]) -> Strided:
    """Return the layout of `inner`, a part of `outer` as `overlaps` yields it, in row-major memory of `outer`."""
    if outer.is_range and not inner.is_range:
        strides = strides_of(shape)
        first = sum(offset * stride for offset, stride in zip(inner.offsets, strides, strict=True))
        return Strided(first - outer.offsets[0], inner.sizes, strides)
    strides = strides_of(outer.sizes)
    steps = zip(inner.offsets, outer.offsets, strides, strict=True)
    return Strided(sum((a - b) * stride for a, b, stride in steps), inner.sizes, strides)


def contiguous_runs(*layouts: Strided) -> tuple[int, list[NDArray[np.int64]]]:
    """Split layouts of the same sizes into runs that are contiguous in all of them; return the length of a run, and for
    each layout the offsets at which the runs begin, in elements."""
    length = min(map(_run_length, layouts))
    begins = []
    for layout in layouts:
        found, inside = np.array([layout.offset], dtype=np.int64), math.prod(layout.sizes)
        for size, stride in zip(layout.sizes, layout.strides, strict=True):
            if inside <= length:
                break
            found = (found[:, None] + np.arange(size, dtype=np.int64) * stride).ravel()
            inside //= size
        begins.append(found)
    return length, begins


def _run_length(layout: Strided) -> int:
    length = 1
    for size, stride in zip(reversed(layout.sizes), reversed(layout.strides), strict=True):
        if size > 1 and stride != length:
            break
        length *= size
    return length


def halves(box: Box) -> tuple[Box, Box]:
    """Cut a box of more than one element in two, along its first dimension of more than one element."""
    cut = next(i for i, size in enumerate(box.sizes) if size > 1)
    size = box.sizes[cut] // 2
    offsets = (*box.offsets[:cut], box.offsets[cut] + size, *box.offsets[cut + 1 :])
    first, second = ((*box.sizes[:cut], n, *box.sizes[cut + 1 :]) for n in (size, box.sizes[cut] - size))
    return Box(box.offsets, first), Box(offsets, second)
