"""Sequence-length balancing: splits a step's samples over ranks and micro-batches so that the ranks finish together.

The split is computed with integers only, so it is the same on every rank and after a resume. Under FSDP all ranks run
the same number of micro-batches in lockstep: in the k-th micro-batch, all ranks wait for the slowest rank.
"""

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

LINEAR = 24576
EXTRA = 2
"""Micro-batches to try beyond the minimum, because more micro-batches may balance better."""

Placed = tuple[int, int]
"""Length of a sample in tokens, and its row."""


def cost(length: int) -> int:
    """Return the relative time of a model pass over a sample of `length` tokens.

    The linear and the quadratic term (attention) have verl's weights (`seqlen_balancing.py`), for a 7B model.
    """
    return length * (LINEAR + length)


def balance_samples(
    lengths: Sequence[int], mini_batches: int, ranks: int, rows_of: Sequence[int] | None = None
) -> list[int]:
    """Return the rank that trains on each row, so that costs are about equal in each mini-batch and in the step.

    Args:
        lengths: tokens of prompt and response of each row, in the order of uid and sample number.
        mini_batches: number of consecutive parts with equally many samples, one optimizer step each.
        rows_of: number of rows of each sample (`Sample.forks`); None if each row is a sample.
    """
    owners = [0] * len(lengths)
    so_far = [0] * ranks
    for part in _parts(rows_of or [1] * len(lengths), mini_batches):
        # Assign the costliest sample first, each to the share with the least cost so far (Graham 1969).
        shares: list[list[int]] = [[] for _ in range(ranks)]
        totals = [(0, share) for share in range(ranks)]
        for row in sorted(part, key=lambda row: -lengths[row]):
            total, share = totals[0]
            shares[share].append(row)
            heapq.heapreplace(totals, (total + cost(lengths[row]), share))
        # The costliest share goes to the rank with the least cost in earlier mini-batches.
        by_need = sorted(range(ranks), key=lambda rank: so_far[rank])
        for rank, (total, share) in zip(by_need, sorted(totals, reverse=True), strict=True):
            so_far[rank] += total
            for row in shares[share]:
                owners[row] = rank
    return owners


@dataclass(frozen=True)
class SampleBalance:
    """Split of a step's samples over mini-batches and ranks, from which each rank's micro-batches follow."""

    lengths: list[list[list[int]]]
    """Tokens of the rows by [mini-batch][rank], in the order of the rank's rows."""

    @classmethod
    def owned(
        cls,
        lengths: Sequence[int],
        owners: Sequence[int],
        mini_batches: int,
        ranks: int,
        rows_of: Sequence[int] | None = None,
    ) -> "SampleBalance":
        """Return the split with each row on its rank in `owners` (from `balance_samples`), in the given order."""
        found: list[list[list[int]]] = []
        for part in _parts(rows_of or [1] * len(lengths), mini_batches):
            of_ranks: list[list[int]] = [[] for _ in range(ranks)]
            for row in part:
                of_ranks[owners[row]].append(lengths[row])
            found.append(of_ranks)
        return cls(found)

    @property
    def mini_batches(self) -> int:
        """Number of mini-batches, which are the optimizer steps of one epoch over the step's samples."""
        return len(self.lengths)

    def rows(self, mini_batch: int, rank: int) -> range:
        """Return the rows of a rank's batch that belong to a mini-batch."""
        start = sum(len(of_ranks[rank]) for of_ranks in self.lengths[:mini_batch])
        return range(start, start + len(self.lengths[mini_batch][rank]))

    def micro_batches(
        self, budget: int, *, padded: bool = False, mini_batch: int | None = None
    ) -> list[list[list[int]]]:
        """Return rows by [rank][micro-batch]. The k-th micro-batches of all ranks cost about the same, or are empty.

        Args:
            budget: maximum tokens of a micro-batch. A longer sample is a micro-batch of its own.
            padded: whether padding counts; the tokens of a micro-batch are then its rows times its longest length.
            mini_batch: number of a mini-batch; None for the whole step.
        """
        parts = range(self.mini_batches) if mini_batch is None else (mini_batch,)
        ranks = [
            sorted(
                placed for part in parts for placed in zip(self.lengths[part][rank], self.rows(part, rank), strict=True)
            )
            for rank in range(len(self.lengths[0]))
        ]
        plan = _padded(ranks, budget) if padded else _packed(ranks, budget)
        return [[[row for _, row in micro] for micro in micros] for micros in plan]


def _parts(rows_of: Sequence[int], count: int) -> list[range]:
    """Return the rows of `count` parts with equally many samples."""
    ends, size = list(accumulate(rows_of, initial=0)), len(rows_of)
    return [range(ends[size * i // count], ends[size * (i + 1) // count]) for i in range(count)]


def _padded(ranks: list[list[Placed]], budget: int) -> list[list[list[Placed]]]:
    """Return micro-batches of samples with similar lengths, which need little padding; longest first on every rank."""
    plan: list[list[list[Placed]]] = []
    for samples in ranks:
        micros: list[list[Placed]] = []
        for sample in reversed(samples):
            if not micros or (len(micros[-1]) + 1) * micros[-1][0][0] > budget:
                micros.append([])
            micros[-1].append(sample)
        plan.append(micros)
    return _filled(plan, max(1, *map(len, plan)))


def _packed(ranks: list[list[Placed]], budget: int) -> list[list[list[Placed]]]:
    fewest_of_each = [_fewest(samples, budget) for samples in ranks]
    fewest = max(1, *map(len, fewest_of_each))
    most = max(fewest, min(fewest + EXTRA, max(map(len, ranks))))
    bound = max(map(_cost, ranks))
    found: list[tuple[int, list[list[list[Placed]]]]] = []
    for count in range(fewest, most + 1):
        plan = _in_lockstep(ranks, fewest_of_each, budget, count)
        # Each further micro-batch all-gathers the weights again, so it must save about one percent of the time.
        found.append((lockstep_cost([[_cost(m) for m in micros] for micros in plan]) * (100 + count), plan))
        if found[-1][0] <= bound * (101 + count):
            break
    return min(found, key=lambda each: each[0])[1]


def lockstep_cost(costs: Sequence[Sequence[int]]) -> int:
    """Return the sum over micro-batches of the largest cost over ranks. `costs` are by [rank][micro-batch]."""
    return sum(map(max, zip(*costs, strict=True)))


def _in_lockstep(
    ranks: list[list[Placed]], fewest_of_each: list[list[list[Placed]]], budget: int, count: int
) -> list[list[list[Placed]]]:
    """Return `count` micro-batches for each rank. The k-th micro-batches of all ranks cost about the same.

    Each micro-batch takes samples up to a target cost: the cost of the longest sample left on any rank or, if larger,
    the largest cost left on a rank divided by the number of micro-batches left.
    """
    waiting = [_Waiting(samples, budget) for samples in ranks]
    plan: list[list[list[Placed]]] = [[] for _ in ranks]
    for to_come in range(count, 0, -1):
        longest = max(rank.longest for rank in waiting)
        target = max(cost(longest), -(-max(rank.cost for rank in waiting) // to_come))
        for rank, micros in zip(waiting, plan, strict=True):
            micros.append(rank.pop_micro_batch(target))
    # If samples of a rank are left over, the rank uses its plan from `_fewest` instead, costliest micro-batch first.
    plan = [
        sorted(fewest, key=_cost, reverse=True) if rank.samples else micros
        for rank, micros, fewest in zip(waiting, plan, fewest_of_each, strict=True)
    ]
    return _filled(plan, count)


class _Waiting:
    """A rank's samples that are in no micro-batch yet, shortest first."""

    def __init__(self, samples: list[Placed], budget: int) -> None:
        self.samples, self._budget = list(samples), budget
        self.cost = _cost(samples)

    @property
    def longest(self) -> int:
        return self.samples[-1][0] if self.samples else 0

    def pop_micro_batch(self, target: int) -> list[Placed]:
        """Remove and return a micro-batch of up to `target` cost. Take long samples first: short ones fit in later."""
        micro_batch: list[Placed] = []
        spent, room = 0, max(self._budget, self.longest)
        while at := bisect_left(self.samples, (min(room, _length(target - spent)) + 1,)):
            sample = self.samples.pop(at - 1)
            micro_batch.append(sample)
            spent, room = spent + cost(sample[0]), room - sample[0]
        self.cost -= spent
        return micro_batch


def _fewest(samples: list[Placed], budget: int) -> list[list[Placed]]:
    """Return about the fewest micro-batches (best-fit decreasing).

    Place samples longest first, each into the fullest micro-batch that has room.
    """
    micros: list[list[Placed]] = []
    rooms: list[tuple[int, int]] = []
    for sample in reversed(samples):
        at = bisect_left(rooms, (sample[0],))
        if at < len(rooms):
            room, micro = rooms.pop(at)
        else:
            room, micro = max(budget, sample[0]), len(micros)
            micros.append([])
        micros[micro].append(sample)
        insort(rooms, (room - sample[0], micro))
    return micros


def _filled(plan: list[list[list[Placed]]], count: int) -> list[list[list[Placed]]]:
    return [micros + [[] for _ in range(count - len(micros))] for micros in plan]


def _cost(samples: list[Placed]) -> int:
    return sum(cost(length) for length, _ in samples)


def _length(most: int) -> int:
    """Return the length of the longest sample that costs at most `most`, or -1."""
    return math.isqrt((LINEAR // 2) ** 2 + most) - LINEAR // 2 if most >= 0 else -1
