"""python -m benchmarks.async_steps: measures steps per hour with `rollout.async_steps`, in virtual time.

Runs k = 0, 1, 2 and 4 (`benchmarks.async_run`) on 4 simulated servers of 16 slots, for three distributions of response
lengths (4 to 20,480 tokens). A step trains on 32 groups of 8 samples. With k = 0, generation and training alternate.
Training takes 1/4 to 4 times as long as generation with k = 0. The tables also show, with the same constants:

- verl, prime-rl: simplified simulations of other trainers' schedules (`benchmarks.async_peers`)
- perfect: the shortest time of a step without waits: its training or, if longer, its generation on all slots

Prints steps per hour and their ratio to k = 0, then the mean and maximal age of the trained tokens in steps, and the
fraction of slots that decode a sample (live slots).

Exits with 0 if k = 2 makes at least 1.8 times the steps of k = 0 where training and generation take equally long.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from rich.console import Console
from rich.table import Table

from benchmarks.async_peers import PrimeRL, Verl, run_peer
from benchmarks.async_run import SECONDS, Measured, Workload, run
from benchmarks.rollout_service import lengths

NAMES = ("reasoning", "bimodal", "uniform")
RATIOS = tuple(map(Fraction, ("1/4", "1/2", "1", "2", "4")))
SCHEDULES = ("k=0", "k=1", "k=2", "k=4", "verl", "prime-rl", "perfect")
GOAL = 1.8


@dataclass(frozen=True)
class Result:
    """One schedule with one ratio of training to generation."""

    seconds: float  # per step, simulated
    speed: float  # steps per hour, relative to k = 0
    live: float  # mean fraction of the slots that decode a sample
    age: str = ""

    @property
    def steps(self) -> str:
        return f"{3600 / (self.seconds * SECONDS):.2f} ({self.speed:.2f})"

    @property
    def load(self) -> str:
        return f"{self.age:8} {self.live:.0%}"


def results(work: Workload, synchronous: Measured, ratio: Fraction) -> dict[str, Result]:
    """Return the result of each schedule. `synchronous`: the measurements of k = 0 without training."""
    training_s = float(ratio) * synchronous.seconds
    base_s = synchronous.seconds + training_s
    measured = {f"k={k}": run(work, k, training_s) for k in (1, 2, 4)}
    measured |= {"verl": run_peer(Verl, work, training_s), "prime-rl": run_peer(PrimeRL, work, training_s)}
    perfect_s = work.perfect_s(synchronous.tokens)
    best_s = max(perfect_s, training_s)
    found = {
        name: Result(each.seconds, base_s / each.seconds, each.live, f"{each.age_mean:.1f} ({each.age_max})")
        for name, each in measured.items()
    }
    found["k=0"] = Result(base_s, 1.0, synchronous.live * synchronous.seconds / base_s, "0.0 (0)")
    found["perfect"] = Result(best_s, base_s / best_s, perfect_s / best_s)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.async_steps", description=__doc__)
    parser.add_argument("--lengths", nargs="+", choices=NAMES, default=NAMES, help="distributions of lengths")
    parser.add_argument("--ratios", type=Fraction, nargs="+", default=RATIOS, help="training time / generation time")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(arguments)
    steps = Table("lengths", "training", *SCHEDULES, title="Steps per hour (times k=0)")
    load = Table("lengths", "training", *SCHEDULES, title="Age of trained tokens, mean (max); live slots")
    worst = float("inf")
    for name in args.lengths:
        work = Workload(lengths(name, args.seed))
        synchronous = run(work, 0, training_s=0.0)
        for ratio in args.ratios:
            found = results(work, synchronous, ratio)
            shown = name, f"{ratio.numerator}:{ratio.denominator}"
            steps.add_row(*shown, *(found[schedule].steps for schedule in SCHEDULES))
            load.add_row(*shown, *(found[schedule].load for schedule in SCHEDULES))
            if ratio == 1:
                worst = min(worst, found["k=2"].speed)
    console = Console(width=150)
    console.print(steps)
    console.print(load)
    return 0 if worst >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
