"""Parts of tensors: each operation is compared with the same operation on sets of single elements."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.storage.boxes import (
    Box,
    bounds,
    boxes_of,
    contiguous_runs,
    halves,
    layout_of,
    normalize,
    overlaps,
    range_box,
    whole_box,
)
from rlhf.storage.index_rows import Table, as_rows, covers, find_uncovered, parse_rows, rows_of
from tests.support.cuts import cut, flat, grid

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def elements(part: Box, shape: tuple[int, ...]) -> list[int]:
    """Return the positions of a part's elements in the flattened tensor, in the part's order."""
    every = np.arange(math.prod(shape))
    if part.is_range:
        return every[part.offsets[0] : part.offsets[0] + part.sizes[0]].tolist()
    slices = tuple(slice(a, a + n) for a, n in zip(part.offsets, part.sizes, strict=True))
    return every.reshape(shape)[slices].ravel().tolist()


@settings(deadline=None, max_examples=150)
@given(data=st.data(), shape=shapes)
def test_a_part_has_the_same_elements_in_every_form(data, shape):
    for part in cut(data, shape, math.prod(shape)):
        mine = elements(part, shape)
        assert part.numel == len(mine)
        assert elements(normalize(part, shape), shape) == mine
        if mine:
            assert bounds(part, shape) == (mine[0], mine[-1] + 1)
            assert normalize(part, shape).is_range == (mine == list(range(mine[0], mine[-1] + 1)))
        boxes = boxes_of(part, shape)
        assert [each for box in boxes for each in elements(box, shape)] == mine
        assert len(boxes) <= max(1, 2 * len(shape) - 1)
        if part.numel > 1:
            assert [each for half in halves(part) for each in elements(half, shape)] == mine


@settings(deadline=None, max_examples=150)
@given(data=st.data(), shape=shapes)
def test_overlaps_are_located_in_the_memory_of_both_parts(data, shape):
    one, other = (normalize(data.draw(st.sampled_from(cut(data, shape, math.prod(shape)))), shape) for _ in range(2))
    found = []
    for common in overlaps(one, other, shape):
        layouts = [layout_of(common, part, shape) for part in (one, other, whole_box(shape))]
        length, begins = contiguous_runs(*layouts)
        of_each = [[i for begin in of_part.tolist() for i in range(begin, begin + length)] for of_part in begins]
        mine, theirs = ([elements(part, shape)[i] for i in at] for part, at in zip((one, other), of_each, strict=False))
        assert mine == theirs == of_each[2] == elements(common, shape)
        for layout, at in zip(layouts, of_each, strict=True):
            assert (layout.offset, layout.span) == (min(at), max(at) - min(at) + 1)
            assert layout.contiguous == (len(at) == layout.span)
        found += mine
    assert found == sorted(set(elements(one, shape)) & set(elements(other, shape)))


@settings(deadline=None, max_examples=150)
@given(data=st.data(), tensors=st.lists(shapes, min_size=1, max_size=4))
def test_index_rows_parse_back_to_their_parts(data, tensors):
    table = Table({f"t{i}": ("F32", shape) for i, shape in enumerate(tensors)})
    parts = [
        (number, normalize(part, shape))
        for number, shape in enumerate(tensors)
        for part in cut(data, shape, math.prod(shape))
        if part.numel
    ]
    parts = data.draw(st.permutations(parts))
    parsed = parse_rows(as_rows(rows_of(parts)), table)
    assert [(int(n), parsed.box(i, table)) for i, n in enumerate(parsed.tensor)] == parts
    assert parsed.numel.tolist() == [part.numel for _, part in parts]
    assert list(zip(parsed.first.tolist(), parsed.stop.tolist(), strict=True)) == [
        bounds(part, tensors[number]) for number, part in parts
    ]
    assert find_uncovered(parsed, table) is None
    if parts:
        lost = data.draw(st.sampled_from(range(len(parts))))
        for wrong in ([*parts[:lost], *parts[lost + 1 :]], [*parts, parts[lost]]):
            assert find_uncovered(parse_rows(as_rows(rows_of(wrong)), table), table) == parts[lost][0]


def test_an_overlap_does_not_hide_a_gap_in_the_cover():
    left, right, again = Box((0, 0), (2, 1)), Box((0, 1), (2, 1)), Box((0, 0), (2, 1))
    assert covers([left, right], (2, 2))
    assert not covers([left, again], (2, 2))
    assert not covers([left, range_box(1, 3)], (2, 2))


@pytest.mark.parametrize(
    "rows",
    [
        [(-1, 0, 2)],  # a dimension is missing
        [(-1, 0, 2), (-1, 0, 1), (-1, 0, 2)],
        [(-1, 0, 2), (0, 0, 1), (-1, 0, 1)],
        [(-1, 0, 3), (-1, 0, 1)],  # beyond the rows
        [(-1, 0, 2), (-1, 1, 4)],  # beyond the columns
        [(-1, 0, 0), (-1, 0, 1)],
        [(-1, -1, 1), (-1, 0, 1)],
        [(-2, 0, 1)],  # a box of one dimension
        [(-3, 0, 1)],
        [(-4, 0, 1)],  # no such tensor
        [(3, 0, 1)],
        [(-(1 << 63), 0, 1)],
    ],
)
def test_invalid_index_rows_are_rejected(rows):
    table = Table({"a": ("F32", (2, 3)), "b": ("F32", (2,)), "c": ("F32", ())})
    with pytest.raises(ValueError, match=r"boxes that lack|shards of a outside its 6 elements|unknown"):
        parse_rows(np.array(rows, dtype=np.int64), table)


def test_the_generated_cuts_include_columns_and_empty_parts():
    """The cuts include columns; without them the other tests would prove little."""
    kinds = set()

    @settings(deadline=None, max_examples=200, database=None)
    @given(data=st.data())
    def collect(data):
        for box in grid(data, (4, 6)):
            kinds.add((normalize(box, (4, 6)).is_range, box.numel > 0))
        kinds.update(("flat", part.numel > 0) for part in flat(data, 24))

    collect()
    assert {(True, True), (False, True), (True, False), ("flat", True)} <= kinds
