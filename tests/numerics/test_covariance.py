"""Compares covariances of tokens and the choice of the smallest values with loops over floats.

`test_update_invariance.py` tests the choice over real ranks.
"""

import random
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from torch import Tensor

from rlhf.algorithms.advantages import only_rank
from rlhf.algorithms.covariance import OverRanks, covariances, smallest
from tests.support.tables import close, random_mask, random_table, tensor

ONE_RANK = OverRanks(only_rank, only_rank)


def test_covariances_count_only_tokens_in_the_mask():
    rng = random.Random(0)
    for _ in range(20):
        rows, columns = rng.randint(1, 5), rng.randint(1, 6)
        p, a = (random_table(rng, rows, columns, 2.0) for _ in range(2))
        mask = random_mask(rng, rows, columns)
        ours, tokens = covariances(tensor(p, mask), tensor(a, mask), torch.tensor(mask), ONE_RANK)
        inside = [(i, j) for i in range(rows) for j in range(columns) if mask[i][j]]
        mean_p, mean_a = (sum(table[i][j] for i, j in inside) / len(inside) for table in (p, a))
        expected = [[(p[i][j] - mean_p) * (a[i][j] - mean_a) * mask[i][j] for j in range(columns)] for i in range(rows)]
        close(ours, expected, tolerance=1e-12)
        assert tokens == len(inside)


@pytest.mark.parametrize("kinds", [1, 3, 1000])
def test_the_smallest_candidates_are_chosen_by_value_and_then_by_key(kinds):
    """Covers many equal values (few `kinds`), fewer candidates than `count`, and no candidates."""
    rng = random.Random(kinds)
    for _ in range(60):
        rows, columns = rng.randint(1, 4), rng.randint(1, 6)
        places = [(i, j) for i in range(rows) for j in range(columns)]
        values = [[rng.randrange(kinds) - kinds / 3 for _ in range(columns)] for _ in range(rows)]
        keys = torch.randint(-(2**63), 2**63 - 1, (rows, columns), generator=torch.Generator().manual_seed(rows))
        candidates = torch.tensor([[rng.random() < 0.7 for _ in range(columns)] for _ in range(rows)])
        count = rng.randint(1, 12)
        ours = smallest(tensor(values), keys, candidates, count, ONE_RANK)
        wanted = sorted((values[i][j], int(keys[i, j]), i, j) for i, j in places if candidates[i, j])[:count]
        assert {(i, j) for i, j in places if ours[i, j]} == {(i, j) for *_, i, j in wanted}


@pytest.mark.parametrize("count", [1, 3, 7, 30])
def test_the_smallest_candidates_are_chosen_over_all_ranks(count):
    """One of three ranks has a single candidate, so its padding must not displace candidates of other ranks."""
    rng = random.Random(count)
    values = [[rng.uniform(0.5, 1.5) for _ in range(6)] for _ in range(3)]
    keys = torch.randint(-(2**63), 2**63 - 1, (3, 6), generator=torch.Generator().manual_seed(1))
    candidates = torch.ones(3, 6, dtype=torch.bool)
    candidates[1, 1:] = False
    gathers: list[dict[int, Tensor]] = [{}, {}]
    barrier = Barrier(3)

    def on_rank(rank: int) -> Tensor:
        calls = iter(gathers)

        def all_gather(mine: Tensor) -> Tensor:
            call = next(calls)
            call[rank] = mine
            barrier.wait(timeout=60)
            return torch.cat([call[other] for other in range(3)])

        rows = slice(rank, rank + 1)
        return smallest(tensor(values[rows]), keys[rows], candidates[rows], count, OverRanks(only_rank, all_gather))

    with ThreadPoolExecutor(3) as threads:
        ours = torch.cat(list(threads.map(on_rank, range(3))))
    every = sorted((values[i][j], i, j) for i in range(3) for j in range(6) if candidates[i, j])
    assert {(i, j) for i, j in ours.nonzero().tolist()} == {(i, j) for _, i, j in every[:count]}


def test_a_batch_without_tokens_has_no_chosen_token():
    nothing = torch.zeros(2, 0)
    found, tokens = covariances(nothing, nothing, nothing, ONE_RANK)
    assert tokens == 0
    assert smallest(found, torch.zeros(2, 0, dtype=torch.int64), nothing.bool(), 1, ONE_RANK).shape == (2, 0)
