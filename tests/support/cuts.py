"""Generates splits of tensors over ranks for property tests: grids of boxes, and ranges of flattened elements."""

from itertools import pairwise, product

from hypothesis import strategies as st

from rlhf.storage.boxes import Box, range_box


def ends(data: st.DataObject, size: int, parts: int) -> list[tuple[int, int]]:
    """Draw `parts` contiguous, possibly empty ranges that cover range(size)."""
    inner = sorted(data.draw(st.lists(st.integers(0, size), min_size=parts - 1, max_size=parts - 1)))
    return list(pairwise([0, *inner, size]))


def grid(data: st.DataObject, shape: tuple[int, ...], most: int = 3) -> list[Box]:
    """Draw boxes that cover a tensor, split along every dimension into up to `most` parts."""
    along = [ends(data, size, data.draw(st.integers(1, most))) for size in shape]
    cells = [tuple(zip(*cell, strict=True)) for cell in product(*along)] if shape else []
    return [Box(low, tuple(b - a for a, b in zip(low, high, strict=True))) for low, high in cells] or [range_box(0, 1)]


def flat(data: st.DataObject, numel: int, most: int = 4) -> list[Box]:
    """Draw ranges that cover the flattened tensor."""
    return [range_box(start, stop) for start, stop in ends(data, numel, data.draw(st.integers(1, most)))]


def cut(data: st.DataObject, shape: tuple[int, ...], numel: int) -> list[Box]:
    """Draw a `grid` or `flat` split."""
    return grid(data, shape) if data.draw(st.booleans()) else flat(data, numel)
