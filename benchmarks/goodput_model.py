"""Simulates the effective training time (ETTR) of runs with failures."""

import random
from dataclasses import dataclass

WAYS = ("snapshots and journal", "snapshots", "saves and journal", "saves")
"""A snapshot in memory after each step, or a save every `save_every` steps; with or without the rollout journal."""
STEPS = 4000


@dataclass(frozen=True)
class Constants:
    """A run to simulate.

    Seconds: `step`, `restart` (from a failure until the ranks train again), `publish` (from the end of a step until its
    snapshot is published). Shares: `rate` (failures per step time), `generation` (of a step), `journaled` (of the time
    spent on an unfinished generation: the part whose samples are in the journal), `stall` (by which snapshots lengthen
    a step).
    """

    step: float
    restart: float
    rate: float
    generation: float
    journaled: float
    publish: float
    stall: float
    save_every: int


def ettr(run: Constants, way: str, seed: int = 1) -> float:
    """Return the time of STEPS steps divided by the time that they take with failures at random times (Poisson)."""
    return STEPS * run.step / _simulate(run, way, seed)[0]


def mean_lost(run: Constants, way: str, seed: int = 1) -> float:
    """Return the mean seconds of work that a failure costs, without the restart."""
    seconds, failures, restarting = _simulate(run, way, seed)
    length = run.step * (1 + run.stall * way.startswith("snapshots"))
    return (seconds - restarting - STEPS * length) / max(1, failures)


def _simulate(run: Constants, way: str, seed: int) -> tuple[float, int, float]:
    """Return the seconds of the run, the number of failures, and the seconds in restarts."""
    chance = random.Random(seed)
    snapshots, journal = way.startswith("snapshots"), way.endswith("journal")
    every, length = (1, run.step * (1 + run.stall)) if snapshots else (run.save_every, run.step)
    clock, ended, failures, restarting = 0.0, 0.0, 0, 0.0
    fails = chance.expovariate(run.rate / run.step)
    done = 0
    recorded: dict[int, float] = {}  # step -> seconds of its generation whose samples are in the journal
    while done < STEPS:
        left = length - recorded.get(done, 0.0)
        if clock + left <= fails:
            clock = ended = clock + left
            recorded[done] = run.generation * length if journal else 0.0
            done += 1
            continue
        worked = recorded.get(done, 0.0) + fails - clock
        if journal:
            finished = worked >= run.generation * length
            kept = run.generation * length if finished else run.journaled * worked
            recorded[done] = max(recorded.get(done, 0.0), kept)
        # The newest state may not be published yet.
        newest = done - (done > 0 and done % every == 0 and fails < ended + run.publish)
        done = newest - newest % every
        failures += 1
        clock = ended = fails
        while True:  # a restart may fail, too
            fails = clock + chance.expovariate(run.rate / run.step)
            restarting += min(run.restart, fails - clock)
            clock = min(clock + run.restart, fails)
            if clock < fails:
                break
            failures += 1
        ended = -run.publish  # the state from which a run resumes is published
    return clock, failures, restarting
