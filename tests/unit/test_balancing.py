"""Balance of samples over ranks and micro-batches.

Each sample occurs once. Micro-batches keep the budget, ranks have similar costs, and a plan depends on lengths only.
"""

import itertools
import random
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rlhf.learning.balancing import SampleBalance, balance_samples, cost, lockstep_cost

lengths_of_a_step = st.lists(st.integers(1, 300), max_size=80)


def skewed(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [max(64, min(20000, round(rng.lognormvariate(7.6, 0.9)))) for _ in range(count)]


def flat(micros: list[list[int]]) -> list[int]:
    return [row for micro in micros for row in micro]


@given(lengths_of_a_step, st.integers(1, 4), st.integers(1, 9), st.integers(1, 500), st.booleans())
@example([5, 5], 1, 9, 5, False)  # ranks without a sample
@example([], 2, 3, 1, True)
@example([300, 299, 1], 1, 1, 250, True)  # two samples exceed the budget
def test_every_sample_is_once_in_micro_batches_within_the_budget(lengths, mini_batches, ranks, budget, padded):
    owners = balance_samples(lengths, mini_batches, ranks)
    plan = SampleBalance.owned(lengths, owners, mini_batches, ranks)
    held = [[length for length, owner in zip(lengths, owners, strict=True) if owner == rank] for rank in range(ranks)]
    for rank in range(ranks):
        assert [length for part in plan.lengths for length in part[rank]] == held[rank]
    for mini_batch in (None, *range(mini_batches)):
        micro_batches = plan.micro_batches(budget, padded=padded, mini_batch=mini_batch)
        assert len({len(micros) for micros in micro_batches}) == 1
        assert len(micro_batches[0]) >= 1
        for rank, micros in enumerate(micro_batches):
            rows = range(len(held[rank])) if mini_batch is None else plan.rows(mini_batch, rank)
            assert sorted(flat(micros)) == list(rows)
            for micro in micros:
                sizes = [held[rank][row] for row in micro]
                tokens = len(sizes) * max(sizes, default=0) if padded else sum(sizes)
                assert tokens <= budget or len(sizes) == 1


@given(lengths_of_a_step, st.integers(1, 4), st.integers(1, 9))
def test_a_mini_batch_has_the_same_samples_whatever_the_ranks(lengths, mini_batches, ranks):
    plan = SampleBalance.owned(lengths, balance_samples(lengths, mini_batches, ranks), mini_batches, ranks)
    single = SampleBalance.owned(lengths, balance_samples(lengths, mini_batches, 1), mini_batches, 1)
    for part, whole in zip(plan.lengths, single.lengths, strict=True):
        assert sorted(flat(part)) == sorted(whole[0])
    assert single.mini_batches == mini_batches
    assert flat([whole[0] for whole in single.lengths]) == lengths


@given(st.lists(st.lists(st.integers(1, 300), min_size=1, max_size=4), max_size=40), st.integers(1, 4))
def test_a_mini_batch_has_all_rows_of_its_samples(samples, mini_batches):
    lengths, rows_of = flat(samples), [len(rows) for rows in samples]
    owners = balance_samples(lengths, mini_batches, 1, rows_of)
    plan = SampleBalance.owned(lengths, owners, mini_batches, 1, rows_of)
    ends = [len(samples) * i // mini_batches for i in range(mini_batches + 1)]
    assert [part[0] for part in plan.lengths] == [flat(samples[a:b]) for a, b in itertools.pairwise(ends)]


@given(lengths_of_a_step, st.integers(1, 4), st.integers(1, 9), st.integers(1, 500))
def test_the_plan_is_a_function_of_the_lengths(lengths, mini_batches, ranks, budget):
    owners = balance_samples(lengths, mini_batches, ranks)
    assert balance_samples(tuple(lengths), mini_batches, ranks) == owners
    plans = [SampleBalance.owned(lengths, owners, mini_batches, ranks).micro_batches(budget) for _ in range(2)]
    assert plans[0] == plans[1]
    assert all(isinstance(row, int) for micros in plans[0] for row in flat(micros))


@pytest.mark.parametrize(("ranks", "samples"), [(2, 64), (8, 128), (32, 512), (128, 4096)])
def test_ranks_have_about_equal_costs_in_each_mini_batch(ranks, samples):
    lengths = skewed(samples * 4)
    plan = SampleBalance.owned(lengths, balance_samples(lengths, 4, ranks), 4, ranks)
    for mini_batch, part in enumerate(plan.lengths):
        costs = [sum(map(cost, held)) for held in part]
        mean = sum(costs) / ranks
        assert max(costs) < 1.03 * mean
        micro_batches = plan.micro_batches(32768, mini_batch=mini_batch)
        held = [[length for each in plan.lengths for length in each[rank]] for rank in range(ranks)]
        micro_costs = [
            [sum(cost(held[rank][row]) for row in rows) for rows in micros] for rank, micros in enumerate(micro_batches)
        ]
        assert lockstep_cost(micro_costs) < 1.05 * mean
        fewest = max(-(-sum(of_rank) // 32768) for of_rank in part)
        assert len(micro_batches[0]) <= fewest + 2


def test_ranks_take_turns_with_the_larger_share():
    """One sample for two ranks: they take turns."""
    assert balance_samples([7] * 6, 6, 2) in ([0, 1, 0, 1, 0, 1], [1, 0, 1, 0, 1, 0])


def test_costs_grow_more_than_lengths():
    """One sample of 20,000 tokens costs as much as many short samples with more tokens in total."""
    lengths = [20000] + [500] * 80
    owners = balance_samples(lengths, 1, 2)
    tokens = [sum(length for length, owner in zip(lengths, owners, strict=True) if owner == rank) for rank in (0, 1)]
    of_long = tokens[owners[0]]
    assert of_long < 0.9 * tokens[1 - owners[0]]


def test_rows_and_micro_batches_of_a_rank():
    plan = SampleBalance.owned([1, 2, 5, 3, 4, 6], [0, 0, 1, 0, 0, 1], 2, 3)
    assert plan.lengths == [[[1, 2], [5], []], [[3, 4], [6], []]]
    assert list(plan.rows(1, 0)) == [2, 3]
    assert plan.micro_batches(3, mini_batch=0) == [[[1, 0]], [[0]], [[]]]
    assert [sorted(flat(micros)) for micros in plan.micro_batches(100)] == [[0, 1, 2, 3], [0, 1], []]


def test_padded_micro_batches_group_samples_of_similar_length():
    assert SampleBalance([[[10, 2, 9, 3]]]).micro_batches(20, padded=True) == [[[0, 2], [3, 1]]]
    assert SampleBalance([[[10, 2, 9, 3]]]).micro_batches(24, padded=False) == [[[0, 2, 3, 1]]]


def test_micro_batches_that_fill_the_budget_exactly_are_found():
    """Six pairs fill the budget exactly; if micro-batches were filled to equal costs, samples would be left over."""
    lengths = [9, 1, 8, 2, 7, 3, 6, 4, 5, 5, 9, 1]
    [micros] = SampleBalance([[lengths]]).micro_batches(10)
    assert [sum(lengths[row] for row in micro) for micro in micros] == [10] * 6


def test_a_large_step_is_planned_quickly():
    lengths = skewed(8192)
    began = time.process_time()
    plan = SampleBalance.owned(lengths, balance_samples(lengths, 16, 1024), 16, 1024)
    plan.micro_batches(32768)
    for mini_batch in range(16):
        plan.micro_batches(32768, mini_batch=mini_batch)
    assert time.process_time() - began < 2  # about 0.3
