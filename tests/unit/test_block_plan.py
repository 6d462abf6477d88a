"""Plan of a file's blocks: one rank writes each block, and receives the other ranks' bytes of the block."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.models.hf import block_plan
from rlhf.models.hf.block_plan import MixedBlock, plan_blocks

BLOCK = 10


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(block_plan, "BLOCK", BLOCK)


@st.composite
def holdings(draw) -> tuple[list[tuple[int, int, int]], int, list[int]]:
    """Draw (begin, end, rank) of a file's bytes after the header, in any order, its size, and the writing ranks."""
    ranks = draw(st.integers(1, 5))
    begin, held = draw(st.integers(1, 25)), []
    for length in draw(st.lists(st.integers(1, 30), max_size=12)):
        held.append((begin, begin + length, draw(st.integers(0, ranks - 1))))
        begin += length
    writers = draw(st.sets(st.integers(0, ranks - 1), min_size=1))
    return draw(st.permutations(held)), begin, sorted(writers)


@settings(deadline=None, max_examples=300)
@given(holdings())
def test_every_byte_reaches_the_one_writer_of_its_block(case):
    held, size, writers = case
    plans = plan_blocks(held, size, writers)
    owner = {byte: rank for begin, end, rank in held for byte in range(begin, end)}
    written: list[int] = []
    for rank, plan in plans.items():
        assert [mixed.number for mixed in plan.mixed] == sorted({mixed.number for mixed in plan.mixed})
        assert plan.own == sorted(plan.own)
        written += plan.own
        for number in plan.own:
            bytes_of_others = {owner.get(byte, rank) for byte in range(number * BLOCK, min(size, (number + 1) * BLOCK))}
            assert (bytes_of_others, rank in writers) == ({rank}, True)
        for mixed in plan.mixed:
            if mixed.writer != rank:
                assert mixed.others == {}
                assert rank in next(m for m in plans[mixed.writer].mixed if m.number == mixed.number).others
                continue
            written.append(mixed.number)
            got = {
                mixed.number * BLOCK + byte: source
                for source, extents in mixed.others.items()
                for begin, end in extents
                for byte in range(begin, end)
            }
            there = range(mixed.number * BLOCK, min(size, (mixed.number + 1) * BLOCK))
            assert got == {byte: owner[byte] for byte in there if owner.get(byte, rank) != rank}
            for source in mixed.others:  # the sender's plan has this block, too
                assert mixed.number in [m.number for m in plans[source].mixed]
    assert sorted(written) == list(range(-(-size // BLOCK)))


def test_largest_part_stays_where_it_is():
    plans = plan_blocks([(2, 5, 0), (5, 12, 1), (12, 20, 2)], 20, [0, 1, 2])
    assert plans[1].mixed == [MixedBlock(0, 1, {0: [(2, 5)]}), MixedBlock(1, 2)]
    assert plans[2].mixed == [MixedBlock(1, 2, {1: [(0, 2)]})]


def test_bytes_of_ranks_that_may_not_write_are_spread_over_those_that_may():
    plans = plan_blocks([(0, 40, 2)], 40, [0, 1])
    assert [mixed.writer for mixed in plans[2].mixed] == [0, 1, 0, 1]
