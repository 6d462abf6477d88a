"""Every rank gets as many groups of each mini-batch as the others, and as few as possible change ranks."""

import random

import pytest

from rlhf.experience.group_shares import equal_shares, owners, share
from rlhf.experience.groups import Group
from rlhf.reward import RewardResult
from rlhf.rollout import Sample
from tests.support.thread_ranks import make_coordinator, run_thread_ranks


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


def make_group(uid: int) -> Group:
    """A group with odd values; that of uid 4 has an empty response."""
    rng = random.Random(uid)
    lengths = [0, 0] if uid == 4 else [rng.randrange(1, 5), rng.randrange(1, 5)]
    samples = [
        Sample(uid, n, [rng.randrange(1 << 40)] * length, [-rng.random() / 3] * length, "stop", uid)
        for n, length in enumerate(lengths)
    ]
    results = [RewardResult(rng.random(), {"own": 0.1}), RewardResult(-0.0, {"own": 1e300})]
    return Group(uid, [uid] * uid, samples, results, [0.0, -0.25], 0.1 if uid % 2 else None)


def unpicklable(group: Group) -> None:
    raise AssertionError(f"group {group.uid} was pickled")


def move(rank: int, held: list[list[int]], batch: list[int], mini_batch_size: int) -> list[tuple[int, bool]]:
    coordinator = make_coordinator()
    mine = [make_group(uid) for uid in held[rank]]
    every = owners(mine, coordinator)
    taken = share(mine, {uid: every[uid] for uid in batch}, mini_batch_size, coordinator)
    return [(group.uid, repr(group) == repr(make_group(group.uid))) for group in taken]


@pytest.mark.parametrize(
    ("held", "batch", "mini_batch_size"),
    [
        ([[0, 1, 2, 3, 4, 5], [], []], [0, 1, 2, 3, 4, 5], 3),
        ([[0], [1, 4, 5], [2, 3, 6, 7]], [4, 5, 1, 2, 3, 7], 6),
        ([[0, 3], [1, 4], [2, 5]], [0, 1, 2, 3, 4, 5], 3),
    ],
)
def test_groups_move_whole_and_as_tensors(monkeypatch, held, batch, mini_batch_size):
    """They were pickled, and those that any rank gave away went to all."""
    monkeypatch.setattr(Group, "__reduce__", unpicklable)
    taken = run_thread_ranks(3, move, held, batch, mini_batch_size)
    assert sorted(uid for of_rank in taken for uid, _ in of_rank) == sorted(batch)
    assert {len(of_rank) for of_rank in taken} == {len(batch) // 3}
    assert all(same for of_rank in taken for _, same in of_rank)
