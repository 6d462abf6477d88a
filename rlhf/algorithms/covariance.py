"""Chooses tokens by the covariance of their log-probs and advantages, over all ranks of a mini-batch."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf.algorithms.statistics import masked


class OverRanks(NamedTuple):
    """Collectives for choosing tokens over all ranks. Every rank must call each collective equally often."""

    all_sum: Callable[[Tensor], Tensor]
    """Sum of a small tensor over ranks."""
    all_gather: Callable[[Tensor], Tensor]
    """Concatenation of equally shaped tensors of all ranks: [K] to [ranks * K]."""


def covariances(log_probs: Tensor, advantages: Tensor, mask: Tensor, ranks: OverRanks) -> tuple[Tensor, int]:
    """Return each token's term of the covariance, (log p - mean log p) * (A - mean A), with means over all ranks.

    Arguments and terms are [N, R]. The terms are float64, and 0 outside the mask. Also return the number of tokens in
    the mask over all ranks.

    Source: Cui et al., "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models" (arXiv
    2505.22617).
    """
    p, a = (masked(values, mask).double() for values in (log_probs, advantages))
    sums = ranks.all_sum(torch.stack([p.sum(), a.sum(), mask.double().sum()]))
    mean_p, mean_a = sums[0] / sums[2].clamp(min=1), sums[1] / sums[2].clamp(min=1)
    return masked((p - mean_p) * (a - mean_a), mask), int(sums[2])


def smallest(values: Tensor, keys: Tensor, candidates: Tensor, count: int, ranks: OverRanks) -> Tensor:
    """Return the `count` candidates of all ranks with the smallest values, ties broken by the smallest key.

    Args:
        values: [N, R] float64.
        keys: [N, R] int64; no two candidates have the same value and key.
        candidates: [N, R] bool.
        count: at least 1, the same on every rank.

    Returns:
        [N, R] bool: all candidates if there are fewer than `count`.
    """
    own = _sorted(values[candidates], keys[candidates])[:count]
    # Pad with the largest value and key, which sort after all candidates. `pad` would convert the key to a float.
    room = count - len(own)
    padded = [
        torch.cat([column, column.new_full([room], largest)])
        for column, largest in [(own[:, 0].view(torch.float64), torch.inf), (own[:, 1], torch.iinfo(torch.int64).max)]
    ]
    gathered = _sorted(*map(ranks.all_gather, padded))
    last_value, last_key = gathered[count - 1, :1].view(torch.float64), gathered[count - 1, 1]
    return candidates & ((values < last_value) | ((values == last_value) & (keys <= last_key)))


def _sorted(values: Tensor, keys: Tensor) -> Tensor:
    """Return the bits of the values and the keys, sorted by value and then key, [K, 2] int64."""
    by_key = keys.argsort(stable=True)
    order = by_key[values[by_key].argsort(stable=True)]
    return torch.stack([values[order].view(torch.int64), keys[order]], dim=1)
