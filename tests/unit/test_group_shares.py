"""Every rank gets as many groups of each mini-batch as the others, and as few as possible change ranks."""

import random

import pytest

from rlhf.experience.group_shares import equal_shares


@pytest.mark.parametrize("seed", range(20))
def test_shares_are_equal_and_moves_few(seed):
    rng = random.Random(seed)
    world_size, share, mini_batches = rng.randint(1, 5), rng.randint(1, 4), rng.randint(1, 4)
    mini_size = world_size * share
    # Some ranks have more than others, as when one of them draws easier prompts.
    ranks = [rank for rank in range(world_size) for _ in range(rng.randint(0, 4))] or [0]
    owners = [rng.choice(ranks) for _ in range(mini_size * mini_batches)]
    takers = equal_shares(owners, mini_size, world_size)
    moved = 0
    for start in range(0, len(owners), mini_size):
        before, after = owners[start : start + mini_size], takers[start : start + mini_size]
        assert all(after.count(rank) == share for rank in range(world_size))
        moved += sum(max(0, before.count(rank) - share) for rank in range(world_size))
    assert sum(a != b for a, b in zip(owners, takers, strict=True)) == moved


def test_a_rank_keeps_its_first_groups():
    assert equal_shares([0, 0, 0, 1, 1, 1, 1, 1], 4, 2) == [0, 0, 1, 1, 1, 1, 0, 0]
    assert equal_shares([2, 2, 2], 3, 3) == [2, 0, 1]
    assert equal_shares([0, 1, 1, 0], 2, 2) == [0, 1, 1, 0]
