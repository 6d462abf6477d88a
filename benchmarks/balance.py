"""python -m benchmarks.balance: compares the update time of ranks in lockstep with the time of a perfect balance.

Simulates 8 to 1,024 ranks with the trainer's planner (`rlhf.learning.balancing`), for three length distributions with
mean 3,000 and maximum 20,000 tokens and 16 samples per prompt. All ranks run their k-th micro-batches at the same time
and wait for the costliest of them. A perfect balance is the cost of all samples divided by the number of ranks. The
`plain way` puts equally many whole prompts on each rank, with one sample per micro-batch.

If one sample costs more than a rank's part of its mini-batch, all ranks wait for this sample and a perfect balance is
impossible. `least` is the lower bound of all plans: 1 if a perfect balance is possible, else more. Exits with 0 if
every plan takes less than 1.15 times `least`.
"""

import argparse
import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from rlhf.learning.balancing import SampleBalance, balance_samples, cost, lockstep_cost

MEAN, LONGEST, SHORTEST, SAMPLES = 3000, 20000, 64, 16
MINI_BATCHES = 4
LIMIT = 1.15


def lognormal(prompts: int, rng: random.Random) -> list[int]:
    """Draw every sample's length independently."""
    sigma = 0.9
    middle = math.log(MEAN) - sigma**2 / 2
    return [_bounded(rng.lognormvariate(middle, sigma)) for _ in range(prompts * SAMPLES)]


def truncated(prompts: int, rng: random.Random) -> list[int]:
    """Draw one sample in twenty at the limit, all others short."""
    share, sigma = 0.05, 0.75
    middle = math.log((MEAN - share * LONGEST) / (1 - share)) - sigma**2 / 2
    return [
        LONGEST if rng.random() < share else _bounded(rng.lognormvariate(middle, sigma))
        for _ in range(prompts * SAMPLES)
    ]


def correlated(prompts: int, rng: random.Random) -> list[int]:
    """Draw hard prompts, whose samples are all long, and easy prompts, whose samples are all short."""
    of_prompts, of_samples = 0.8, 0.4
    middle = math.log(MEAN) - (of_prompts**2 + of_samples**2) / 2
    return [
        _bounded(math.exp(hardness + rng.gauss(0, of_samples)))
        for hardness in [rng.gauss(middle, of_prompts) for _ in range(prompts)]
        for _ in range(SAMPLES)
    ]


def _bounded(length: float) -> int:
    return max(SHORTEST, min(LONGEST, round(length)))


DISTRIBUTIONS: dict[str, Callable[[int, random.Random], list[int]]] = {
    "lognormal": lognormal,
    "truncated": truncated,
    "correlated": correlated,
}


@dataclass(frozen=True)
class Balance:
    """Results of one case: times relative to a perfect balance, and micro-batches per mini-batch."""

    planned: float
    micro_batches: float
    plain: float | None
    """None if the number of prompts is not a multiple of the number of ranks."""
    least: float
    """Lower bound of all plans: 1, or more if a mini-batch has a sample that costs more than a rank's part."""


def balance(name: str, ranks: int, prompts: int, budget: int) -> Balance:
    """Simulate mini-batches of `prompts` prompts."""
    lengths = DISTRIBUTIONS[name](prompts * MINI_BATCHES, random.Random(f"{name} {ranks} {prompts}"))
    plan = SampleBalance.owned(lengths, balance_samples(lengths, MINI_BATCHES, ranks), MINI_BATCHES, ranks)
    planned, plain, micros, least = 0, 0, 0, 0.0
    for mini_batch in range(MINI_BATCHES):
        mine = lengths[mini_batch * prompts * SAMPLES : (mini_batch + 1) * prompts * SAMPLES]
        own = [[length for part in plan.lengths for length in part[rank]] for rank in range(ranks)]
        micro_batches = plan.micro_batches(budget, mini_batch=mini_batch)
        planned += lockstep_cost(
            [[sum(cost(own[rank][row]) for row in rows) for rows in of] for rank, of in enumerate(micro_batches)]
        )
        micros += len(micro_batches[0])
        size = max(len(mine) // ranks, 1)
        plain += lockstep_cost([sorted(map(cost, mine[start : start + size])) for start in range(0, len(mine), size)])
        least += max(cost(max(mine)), sum(map(cost, mine)) / ranks)
    perfect = sum(map(cost, lengths)) / ranks
    return Balance(
        planned / perfect, micros / MINI_BATCHES, None if prompts % ranks else plain / perfect, least / perfect
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.balance", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 32, 128, 1024])
    parser.add_argument(
        "--prompts-per-rank", type=int, default=2, help="prompts per rank in a mini-batch, 16 samples each (default 2)"
    )
    parser.add_argument("--budget", type=int, default=32768, help="tokens of a micro-batch (default 32768)")
    chosen = parser.parse_args(arguments)
    table = Table("ranks", "prompts", "lengths", "micro-batches", "plain way", "planned", "gain", "least")
    missed = 0
    for ranks in chosen.ranks:
        # 32 prompts are dapo_math's mini-batch at any number of ranks.
        for prompts in dict.fromkeys((chosen.prompts_per_rank * ranks, 32)):
            for name in DISTRIBUTIONS:
                found = balance(name, ranks, prompts, chosen.budget)
                missed += found.planned >= LIMIT * found.least
                table.add_row(*_row(ranks, prompts, name, found))
    console = Console(width=120)
    console.print(table)
    if missed:
        console.print(f"{missed} cases take at least {LIMIT} times the lower bound.")
    return 1 if missed else 0


def _row(ranks: int, prompts: int, name: str, found: Balance) -> list[str]:
    return [
        f"{ranks:,}",
        f"{prompts:,}",
        name,
        f"{found.micro_batches:.1f}",
        "" if found.plain is None else f"{found.plain:.2f}",
        f"{found.planned:.3f}",
        "" if found.plain is None else f"{found.plain / found.planned:.2f}x",
        "1" if found.least < 1 + 1e-9 else f"{found.least:.2f}: too few samples",
    ]


if __name__ == "__main__":
    sys.exit(main())
