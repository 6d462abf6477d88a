"""Tests that resharding moves every value to its sample bit for bit, whichever rank generated the sample."""

import functools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf.learning.resharding import SampleResharder, TrainingBatches
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.gloo import GlooTransport
from tests.support.numeric_ranks import run_ranks, single_rank
from tests.support.tiny_updates import EveryBatch, random_batch, with_observations

RANKS, GROUPS, GROUP, MINI_BATCHES = 4, 10, 3, 2
PER_TOKEN = ("response_mask", "staleness", "sampling_mask", "rollout_log_probs", "advantages", "values")


@functools.cache
def whole_batch() -> EveryBatch:
    """Return the step's samples in the order of uids. The values include -0.0, NaN, infinity and subnormal numbers."""
    batch = with_observations(random_batch(seed=3, samples=GROUPS * GROUP, prompt=(1, 30), response=(0, 40)))
    values = batch.rollout_log_probs.clone()
    values[::2] *= 1e-42
    masks = torch.arange(values.numel() * 3).view(*values.shape, 3).int() * batch.response_mask[..., None]
    ages = (torch.arange(values.numel()).view_as(values) % 3).int() * batch.response_mask
    values[1, :3] = torch.tensor([-0.0, torch.nan, torch.inf])
    numbers = torch.arange(GROUPS * GROUP)
    return replace(batch, values=values, numbers=numbers, staleness=ages, sampling_mask=masks, returns=None)


def rollout_ranks(case: str) -> list[int]:
    """Return the rank that generated each group."""
    rng = random.Random(case)
    if case == "consecutive groups":
        return [group * RANKS // GROUPS for group in range(GROUPS)]
    if case == "all on the last":
        return [RANKS - 1] * GROUPS
    return [rng.choice([0, 2, 3]) for _ in range(GROUPS)]


CASES = ("consecutive groups", "all on the last", "random, none on one")


def resharded(case: str, coordinator: Coordinator) -> tuple[EveryBatch, TrainingBatches, list[int]]:
    """Return this rank's rollout batch, its training batch, and its rows of the whole batch."""
    mine = [group for group, rank in enumerate(rollout_ranks(case)) if rank == coordinator.rank]
    rows = [group * GROUP + sample for group in mine for sample in range(GROUP)]
    rollout = whole_batch().select(torch.tensor(rows, dtype=torch.int64))
    uids = [100 + 7 * (row // GROUP) for row in rows]
    return rollout, SampleResharder(MINI_BATCHES, coordinator).reshard(rollout, uids, 1), rows


def with_figures(training: TrainingBatches, rollout: EveryBatch) -> EveryBatch:
    """Return the training batch with per-token values of the rollout batch."""
    figures = {name: training.to_training.of_tokens(getattr(rollout, name)) for name in ("values", "advantages")}
    return EveryBatch(**training.batch.present(), **figures)


def on_a_rank() -> dict[str, Any]:
    """Return, by case, this rank's training batch, and the values that its rollout batch received."""
    coordinator = Coordinator(GlooTransport())
    found: dict[str, Any] = {}
    for case in CASES:
        rollout, training, rows = resharded(case, coordinator)
        # Values move from the training batch to the rollout batch and back.
        columns = torch.arange(training.batch.response_mask.shape[1])
        figures = (1000.0 * training.batch.numbers[:, None] + columns) * training.batch.response_mask
        found[case] = {
            "training": {name: getattr(with_figures(training, rollout), name) for name in FIELDS},
            "lengths": training.balance.lengths,
            "rollout": training.to_rollout.of_tokens(figures),
            "rows": rows,
        }
    return found


FIELDS = ("input_ids", "prompt_lengths", "response_lengths", "numbers", *PER_TOKEN)


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(RANKS, on_a_rank)


def bits(tensor: Tensor) -> list[Any]:
    return tensor.contiguous().view(torch.int32).tolist() if tensor.dtype == torch.float32 else tensor.tolist()


@pytest.mark.parametrize("case", CASES)
def test_every_sample_arrives_on_one_training_rank_unchanged(ranks, case):
    whole, seen = whole_batch(), []
    for number, rank in enumerate(ranks):
        training, lengths = rank[case]["training"], rank[case]["lengths"]
        rows = training["numbers"].tolist()  # the sample's row in the whole batch
        half = GROUPS * GROUP // MINI_BATCHES
        first = [row for row in rows if row < half]
        assert rows == sorted(first) + sorted(row for row in rows if row >= half)
        assert [len(of_rank[number]) for of_rank in lengths] == [len(first), len(rows) - len(first)]
        expected = whole.select(torch.tensor(rows, dtype=torch.int64))
        for name in FIELDS:
            assert bits(training[name]) == bits(getattr(expected, name)), name
        seen += rows
    assert sorted(seen) == list(range(GROUPS * GROUP))


@pytest.mark.parametrize("case", CASES)
def test_values_of_the_training_ranks_return_to_the_rollout_ranks(ranks, case):
    whole = whole_batch()
    figures = (1000.0 * whole.numbers[:, None] + torch.arange(whole.response_mask.shape[1])) * whole.response_mask
    for rank in ranks:
        rows = torch.tensor(rank[case]["rows"], dtype=torch.int64)
        width = max(whole.response_lengths[rows].tolist(), default=0)
        assert torch.equal(rank[case]["rollout"], figures[rows, :width])


def test_training_batches_do_not_depend_on_the_rollout_ranks(ranks):
    for rank in ranks:
        one, *others = ([bits(rank[case]["training"][name]) for name in FIELDS] for case in CASES)
        assert all(other == one for other in others)
        assert all(rank[case]["lengths"] == ranks[0][CASES[0]]["lengths"] for case in CASES)


def test_ranks_have_about_equal_tokens(ranks):
    for of_ranks in ranks[0][CASES[1]]["lengths"]:
        tokens = [sum(lengths) for lengths in of_ranks]
        assert max(tokens) - min(tokens) <= max(length for lengths in of_ranks for length in lengths)


def test_every_epoch_step_and_seed_has_another_shuffle():
    def training(seed: int, step: int) -> TrainingBatches:
        rollout = replace(whole_batch())
        resharder = SampleResharder(MINI_BATCHES, Coordinator(GlooTransport()), seed)
        return resharder.reshard(rollout, [r // GROUP for r in range(GROUPS * GROUP)], step)

    with single_rank():
        first = training(1, 1)
        assert first.shuffle is not None
        present = with_figures(first, whole_batch())
        drawn = [present, *(first.shuffle.moved(present, epoch) for epoch in (1, 2))]
        others = [training(2, 1).batch, training(1, 2).batch]
        again = training(1, 1)
        assert torch.equal(again.batch.numbers, first.batch.numbers)
        for epoch, batch in enumerate(drawn):
            # `numbers` is the sample's row in the whole batch.
            expected = whole_batch().select(batch.numbers)
            for name in FIELDS:
                assert bits(getattr(batch, name)) == bits(getattr(expected, name)), name
            lengths = (batch.prompt_lengths + batch.response_lengths).tolist()
            assert first.shuffle.deal(epoch)[1].lengths == [[lengths[:15]], [lengths[15:]]]
        halves = {frozenset(batch.numbers[:15].tolist()) for batch in [*drawn, *others]}
        assert len(halves) == 5, "every draw has other mini-batches"
        assert all(len({row // GROUP for row in half}) > 15 // GROUP for half in halves), "samples, not whole groups"


def test_one_rank_copies_nothing():
    with single_rank():
        rollout = replace(whole_batch())
        training = SampleResharder(MINI_BATCHES, Coordinator(GlooTransport())).reshard(
            rollout, [r // GROUP for r in range(30)], 1
        )
        for name in FIELDS:
            if name not in ("advantages", "values"):
                assert getattr(training.batch, name).data_ptr() == getattr(rollout, name).data_ptr()
        assert training.to_training.of_tokens(rollout.advantages) is rollout.advantages
