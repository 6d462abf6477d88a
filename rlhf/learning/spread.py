"""Spread of a step's samples over the ranks and over micro-batches, so that no rank waits for another.

Pure integers: the same plan on every rank and after a resume. Under FSDP the ranks go in lockstep, micro-batch by
micro-batch: all need equally many, and the k-th takes as long as its largest one over the ranks.
"""

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

LINEAR = 24576
EXTRA = 2
"""Micro-batches beyond the fewest that are tried, since they may be more alike."""

Placed = tuple[int, int]
"""Length of a sample in tokens, and its row."""


def cost(length: int) -> int:
    """Relative time of a sample of `length` tokens through a model: linear, and quadratic in attention.

    The weights are verl's (`seqlen_balancing.py`), about those of a 7B model.
    """
    return length * (LINEAR + length)


def spread(lengths: Sequence[int], mini_batches: int, ranks: int) -> list[int]:
    """Rank of each sample of a step, such that the ranks' costs are alike in each mini-batch and over all of them.

    Args:
        lengths: tokens of prompt and response of each sample, by uid and number of the sample.
        mini_batches: consecutive parts of equal size, one optimizer step each.
    """
    owners = [0] * len(lengths)
    so_far = [0] * ranks
    for part in _parts(len(lengths), mini_batches):
        # The costliest first, each to the share that has least (Graham 1969).
        shares: list[list[int]] = [[] for _ in range(ranks)]
        totals = [(0, share) for share in range(ranks)]
        for row in sorted(part, key=lambda row: -lengths[row]):
            total, share = totals[0]
            shares[share].append(row)
            heapq.heapreplace(totals, (total + cost(lengths[row]), share))
        # The largest share to the rank that has had least.
        by_need = sorted(range(ranks), key=lambda rank: so_far[rank])
        for rank, (total, share) in zip(by_need, sorted(totals, reverse=True), strict=True):
            so_far[rank] += total
            for row in shares[share]:
                owners[row] = rank
    return owners


@dataclass(frozen=True)
class Spread:
    """Lengths of a step's samples on all ranks, and with them every rank's micro-batches."""

    lengths: list[list[list[int]]]
    """Tokens of the samples by [mini-batch][rank], in the order of the rank's rows."""

    @classmethod
    def owned(cls, lengths: Sequence[int], owners: Sequence[int], mini_batches: int, ranks: int) -> "Spread":
        """Of samples that are dealt to their `owners` (see `spread`); a rank's rows keep their order."""
        found: list[list[list[int]]] = []
        for part in _parts(len(lengths), mini_batches):
            of_ranks: list[list[int]] = [[] for _ in range(ranks)]
            for row in part:
                of_ranks[owners[row]].append(lengths[row])
            found.append(of_ranks)
        return cls(found)

    @property
    def mini_batches(self) -> int:
        """Optimizer steps in a walk over the step's samples."""
        return len(self.lengths)

    def rows(self, mini_batch: int, rank: int) -> range:
        """Rows of a rank that belong to a mini-batch."""
        start = sum(len(of_ranks[rank]) for of_ranks in self.lengths[:mini_batch])
        return range(start, start + len(self.lengths[mini_batch][rank]))

    def micro_batches(
        self, budget: int, *, padded: bool = False, mini_batch: int | None = None
    ) -> list[list[list[int]]]:
        """Rows by [rank][micro-batch] of a mini-batch, or of the whole step; equally many micro-batches on every rank,
        empty ones where it has fewer.

        Each sample is in one of them. Their tokens are at most `budget`, except that a sample of more is alone. The
        k-th ones of all ranks cost about the same.

        Args:
            padded: count rows times the longest, as a padded micro-batch has them; else the tokens themselves.
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


def _parts(size: int, count: int) -> list[range]:
    return [range(size * i // count, size * (i + 1) // count) for i in range(count)]


def _padded(ranks: list[list[Placed]], budget: int) -> list[list[list[Placed]]]:
    """Like lengths together, so that little is padding, the longest first on every rank."""
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
        # One more micro-batch, with its gathering of weights, has to gain about a hundredth.
        found.append((lockstep_cost([[_cost(m) for m in micros] for micros in plan]) * (100 + count), plan))
        if found[-1][0] <= bound * (101 + count):
            break
    return min(found, key=lambda each: each[0])[1]


def lockstep_cost(costs: Sequence[Sequence[int]]) -> int:
    """Time of micro-batches whose costs are by [rank][micro-batch]: of each the largest over the ranks."""
    return sum(map(max, zip(*costs, strict=True)))


def _in_lockstep(
    ranks: list[list[Placed]], fewest_of_each: list[list[list[Placed]]], budget: int, count: int
) -> list[list[list[Placed]]]:
    """`count` micro-batches for each rank: of the first every rank takes as much as the costliest sample left, or as an
    equal part of what is left, and so on."""
    waiting = [_Waiting(samples, budget) for samples in ranks]
    plan: list[list[list[Placed]]] = [[] for _ in ranks]
    for to_come in range(count, 0, -1):
        longest = max(rank.longest for rank in waiting)
        target = max(cost(longest), -(-max(rank.cost for rank in waiting) // to_come))
        for rank, micros in zip(waiting, plan, strict=True):
            micros.append(rank.take(target))
    # A rank that has samples left goes by size alone, the costliest micro-batch first as on the others.
    plan = [
        sorted(fewest, key=_cost, reverse=True) if rank.samples else micros
        for rank, micros, fewest in zip(waiting, plan, fewest_of_each, strict=True)
    ]
    return _filled(plan, count)


class _Waiting:
    """Samples of a rank that are in no micro-batch yet, the shortest first."""

    def __init__(self, samples: list[Placed], budget: int) -> None:
        self.samples, self._budget = list(samples), budget
        self.cost = _cost(samples)

    @property
    def longest(self) -> int:
        return self.samples[-1][0] if self.samples else 0

    def take(self, target: int) -> list[Placed]:
        """A micro-batch of up to `target` cost: always the longest that fits, so that the short ones are there to fill
        the later ones."""
        taken: list[Placed] = []
        spent, room = 0, max(self._budget, self.longest)
        while at := bisect_left(self.samples, (min(room, _length(target - spent)) + 1,)):
            sample = self.samples.pop(at - 1)
            taken.append(sample)
            spent, room = spent + cost(sample[0]), room - sample[0]
        self.cost -= spent
        return taken


def _fewest(samples: list[Placed], budget: int) -> list[list[Placed]]:
    """About the fewest micro-batches that hold the samples: the longest first, each where least room remains."""
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
    """The longest sample that costs at most so much; negative if none does."""
    return math.isqrt((LINEAR // 2) ** 2 + most) - LINEAR // 2 if most >= 0 else -1
