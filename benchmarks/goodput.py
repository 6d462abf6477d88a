"""python -m benchmarks.goodput: measures effective training time (ETTR) with failures, and simulates larger runs.

ETTR is the time of the steps in a run without failures, divided by the time that a run with failures takes.

Part 1 trains a small policy under the supervisor. A failure hits 1, 5 or 10 % of the steps. The kinds alternate:
SIGKILL of the last rank (rank), of rank 0 (driver) or of the supervisor, whose command starts again at once, and an
input/output error in a save (storage). SIGKILLs come at a random time of a step. `snapshots` publishes a snapshot in
memory after each step, writes the journal, and saves every 20 steps; `saves` only saves every 20 steps. The lost time
of a failure is the time from rank 0's last event before the crash until the restarted run reaches this event again.
ETTR leaves out the first start and the last save.

`--part nodes` does the same with two nodes of one rank each on this machine (`goodput_nodes`), under torchrun. Not the
supervisor fails, but a node (its processes, disk and memory are gone, and both nodes start again) or the network. The
network is cut for 5 s; the lost time lasts from the cut until rank 0's first event after it.

Part 2 simulates larger runs, with failures at random times, also in restarts. A journal keeps all samples of a finished
generation. Of an unfinished generation it keeps the share `--journaled` of the time spent; 0 means that no sample was
finished. The simulation assumes the share of generation in a step (`--generation`), the time until a snapshot is
published (`--publish`), how much snapshots lengthen a step (`--stall`), and the serial work per rank in a restart
(`--per-rank`).
"""

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.figures import spread
from benchmarks.goodput_model import WAYS, Constants, ettr, mean_lost
from benchmarks.goodput_nodes import ADDRESSES, train, two_nodes
from benchmarks.goodput_notes import (
    EVENTS,
    FOLDER_VARIABLE,
    HISTORY_VARIABLE,
    KINDS,
    KINDS_OF_NODES,
    Failure,
    plan_of,
)

SAVE_EVERY = 20
RATES = (0.01, 0.05, 0.10)
REAL_WAYS = {
    "snapshots": ("checkpoint.memory.freq=1", "checkpoint.journal=true"),
    "saves": ("checkpoint.memory.freq=0", "checkpoint.journal=false"),
}
Train = Callable[[int, int, str, list[Failure], list[str]], "Outcome"]
SEEDS = 10
GOAL, GOAL_STEP_S, GOAL_RESTART_S, GOAL_RATE = 0.95, 300.0, 60.0, 0.10


@dataclass
class Outcome:
    """Figures of one run: its seconds, the seconds lost by each kind of failure, and the repeated steps."""

    seconds: float
    lost: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    repeated: int = 0
    failures: int = 0


def settings_of(folder: Path, directory: Path, steps: int, way: str, overrides: list[str]) -> list[str]:
    pairs = [(10 + (7 * i) % 83, 10 + (11 * i) % 79) for i in range(200)]
    rows = [{"prompt": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in pairs]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        *(f"trainer.default_local_dir={directory}", f"trainer.total_training_steps={steps}"),
        *(f"trainer.save_freq={SAVE_EVERY}", "trainer.test_freq=0"),
        *(f"data.train_files={folder}/sums.jsonl", "reward=exact_match", "data.train_batch_size=32", "rollout.n=8"),
        *("actor.ppo_mini_batch_size=32", "trainer.experiment_name=goodput", "trainer.device=cpu"),
        *("trainer.threads_per_rank=1", *REAL_WAYS[way], *overrides),
    ]


def prepared(folder: Path, directory: Path, failures: list[Failure]) -> dict[str, str]:
    """Write the plan of the failures, and return the environment of the ranks."""
    (folder / "plan.json").write_text(json.dumps([vars(failure) for failure in failures]))
    return {
        "RLHF_EVENT_LISTENER": "benchmarks.goodput_notes:on_event",
        FOLDER_VARIABLE: str(folder),
        HISTORY_VARIABLE: str(directory / "rlhf/goodput/metrics.jsonl"),
    }


def run(ranks: int, steps: int, way: str, failures: list[Failure], overrides: list[str]) -> Outcome:
    """Train once; start the command again each time the supervisor is killed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = os.environ | prepared(folder, folder, failures)
        command = [sys.executable, "-m", "rlhf.train", f"trainer.nproc={ranks}"]
        command += settings_of(folder, folder, steps, way, overrides)
        while True:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            if done.returncode != -9:
                break
        if done.returncode:
            raise RuntimeError(f"the run failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        return outcome_of(_notes(folder), steps)


def run_nodes(nodes: int, steps: int, way: str, failures: list[Failure], overrides: list[str]) -> Outcome:
    """Train once on two nodes."""
    assert nodes == len(ADDRESSES)
    with tempfile.TemporaryDirectory() as name:
        folder, disk = Path(name), Path(name) / "disk"
        directory = disk / "checkpoints"
        memory = (f"checkpoint.memory.dir={disk}", "checkpoint.memory.replicas=1") if way == "snapshots" else ()
        settings = settings_of(folder, directory, steps, way, [*memory, *overrides])
        with two_nodes(disk) as started:
            # The metric history is on the disk of the first node, which is never lost.
            environment = prepared(folder, started[0].seen_from_outside(directory), failures)
            train(started, disk, folder, settings, environment)
        return outcome_of(_notes(folder), steps)


def _notes(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "notes.jsonl").read_text().splitlines()]


def outcome_of(notes: list[dict], steps: int) -> Outcome:
    """Compute a run's figures from the notes of its events and failures."""
    notes = sorted(notes, key=lambda note: note["time"])
    events = [note for note in notes if "event" in note]
    fired = [note for note in notes if "kind" in note]
    outcome = Outcome(events[-1]["time"] - events[0]["time"], failures=len(fired))
    outcome.repeated = sum(note["event"] == EVENTS[0] for note in events) - steps
    reached, since, pid, lost = (0, 0), events[0]["time"], events[0]["pid"], False
    for note in events:
        place = note["step"], EVENTS.index(note["event"])
        lost, pid = lost or note["pid"] != pid, note["pid"]
        cuts = [each for each in fired if each["kind"] == "network" and each["time"] <= note["time"]]
        if cuts and not lost:
            outcome.lost["network"].extend(note["time"] - cut["begun"] for cut in cuts)
            fired = [each for each in fired if each not in cuts]
        if place < reached:
            continue
        if lost:
            causes = [each for each in fired if each["time"] <= note["time"]]
            for cause in causes:
                outcome.lost[cause["kind"]].append((note["time"] - since) / len(causes))
            fired, lost = fired[len(causes) :], False
        reached, since = place, note["time"]
    return outcome


def real(arguments: argparse.Namespace, counts: Sequence[int], train: Train, unit: str, kinds: Sequence[str]) -> None:
    """Run part 1, or the same on nodes, and print its tables."""
    chance = random.Random(arguments.seed)
    sys.stdout.write(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start\n")
    for count in counts:
        plain = train(count, SAVE_EVERY, "saves", [], arguments.overrides)
        step = plain.seconds / SAVE_EVERY
        sys.stdout.write(
            f"\n## {count} {unit}{'s' if count > 1 else ''}, steps of {step:.2f} s, {arguments.steps} steps\n\n"
            "| way | steps with a failure | ETTR | repeated steps per failure | lost seconds per failure |\n"
            "|---|---|---|---|---|\n"
        )
        for rate in arguments.rates:
            failures = plan_of(arguments.steps, math.ceil(rate * arguments.steps), SAVE_EVERY, step, chance, kinds)
            for way in REAL_WAYS:
                outcomes = [
                    train(count, arguments.steps, way, failures, arguments.overrides) for _ in range(arguments.repeats)
                ]
                sys.stdout.write(row(way, rate, step * arguments.steps, outcomes))
                sys.stdout.flush()


def row(way: str, rate: float, useful: float, outcomes: list[Outcome]) -> str:
    kinds = dict.fromkeys((*KINDS, *KINDS_OF_NODES))
    lost = {kind: [s for outcome in outcomes for s in outcome.lost[kind]] for kind in kinds}
    shown = "; ".join(f"{kind} {spread(seconds, '.1f')}" for kind, seconds in lost.items() if seconds)
    ratios = spread([100 * useful / outcome.seconds for outcome in outcomes], ".0f")
    repeated = statistics.mean(outcome.repeated / outcome.failures for outcome in outcomes)
    return f"| {way} | {rate:.0%} | {ratios} % | {repeated:.1f} | {shown} |\n"


def simulated(arguments: argparse.Namespace) -> None:
    """Run part 2, and print its tables."""

    def constants(step: float, restart: float, ranks: int, rate: float) -> Constants:
        return Constants(
            step=step,
            restart=restart + ranks * arguments.per_rank,
            rate=rate,
            generation=arguments.generation,
            journaled=arguments.journaled,
            publish=arguments.publish,
            stall=arguments.stall,
            save_every=SAVE_EVERY,
        )

    assumed = (
        f"generation {arguments.generation:.0%} of a step, of which the journal keeps {arguments.journaled:.0%} while "
        f"it runs; {arguments.publish:g} s to publish a snapshot; snapshots lengthen steps by {arguments.stall:.1%}; "
        f"{1000 * arguments.per_rank:g} ms of restart per rank"
    )
    sys.stdout.write(f"\n## Simulated. Assumed: {assumed}\n")
    header = f"| {' | '.join(WAYS)} |\n|{'---|' * (2 + len(WAYS))}\n"
    sys.stdout.write(f"\n8 ranks, restarts of {GOAL_RESTART_S:g} s:\n\n| step | steps with a failure {header}")
    for step in arguments.step_seconds:
        for rate in arguments.rates:
            figures = [ettr(constants(step, GOAL_RESTART_S, 8, rate), way) for way in WAYS]
            sys.stdout.write(f"| {step:g} s | {rate:.0%} | {' | '.join(f'{figure:.1%}' for figure in figures)} |\n")
    sys.stdout.write(f"\nSteps of {GOAL_STEP_S:g} s, failures in 10 % of the steps:\n\n| ranks | restart {header}")
    for ranks in arguments.simulated_ranks:
        for restart in arguments.restarts:
            figures = [ettr(constants(GOAL_STEP_S, restart, ranks, GOAL_RATE), way) for way in WAYS]
            sys.stdout.write(f"| {ranks:,} | {restart:g} s | {' | '.join(f'{figure:.1%}' for figure in figures)} |\n")
    goal = constants(GOAL_STEP_S, GOAL_RESTART_S, 0, GOAL_RATE)
    sys.stdout.write(
        f"\nThe goal is {GOAL:.0%} at {GOAL_RATE:.0%}, with steps of {GOAL_STEP_S:g} s and restarts of "
        f"{GOAL_RESTART_S:g} s in all. Median of {SEEDS} simulations:\n\n"
    )
    for way in WAYS:
        sys.stdout.write(f"- {way}: {verdict(goal, way)}\n")
    sys.stdout.write(
        f"\n{WAYS[0]}, by the share of generation, and by the journaled part of an unfinished generation:\n\n"
    )
    for generation in (0.5, 0.7, 0.8):
        for journaled in (0.0, 0.5):
            other = replace(goal, generation=generation, journaled=journaled)
            sys.stdout.write(f"- {generation:.0%}, {journaled:.0%}: {verdict(other, WAYS[0])}\n")


def verdict(run: Constants, way: str) -> str:
    """Return the ETTR of several simulations, whether all or some reach the goal, and the cost of a failure."""
    figures = [ettr(run, way, seed) for seed in range(SEEDS)]
    reached = sum(figure >= GOAL for figure in figures)
    cost = statistics.mean(mean_lost(run, way, seed) for seed in range(SEEDS))
    return (
        f"{spread(figures, '.1%')}, {reached} of {SEEDS} reach the goal; a failure costs {cost:.0f} s and the restart"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.goodput", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=("real", "nodes", "simulated"), help="run one part only")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="ranks of the real runs")
    parser.add_argument("--steps", type=int, default=100, help="steps of a real run")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="failures per step")
    parser.add_argument("--repeats", type=int, default=1, help="runs with the same failures")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--step-seconds", type=float, nargs="+", default=[5, 30, 60, 300, 600])
    parser.add_argument("--restarts", type=float, nargs="+", default=[15, 60], help="seconds until ranks train again")
    parser.add_argument("--simulated-ranks", type=int, nargs="+", default=[8, 64, 512, 1024])
    parser.add_argument("--generation", type=float, default=0.7)
    parser.add_argument("--journaled", type=float, default=0.0)
    parser.add_argument("--publish", type=float, default=10.0)
    parser.add_argument("--stall", type=float, default=0.0)
    parser.add_argument("--per-rank", type=float, default=0.01)
    parser.add_argument("overrides", nargs="*", help="settings for the real runs, after --")
    arguments = parser.parse_args()
    if arguments.part in (None, "real"):
        real(arguments, arguments.ranks, run, "rank", KINDS)
    if arguments.part in (None, "nodes"):
        real(arguments, [len(ADDRESSES)], run_nodes, "node", KINDS_OF_NODES)
    if arguments.part in (None, "simulated"):
        simulated(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
