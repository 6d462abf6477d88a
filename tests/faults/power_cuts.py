"""Checks that power cuts lose no save: `python -m tests.faults.power_cuts --states N --finish K --seed S`.

Records the file operations of real saves of every kind, builds states that a power cut may leave
(`tests.support.power_cut_states`), and starts the run again in each state. The run must find the newest checkpoint
reported as saved, or a later one, with its history and journal, and save again. Exits with 0 only if every run does.

In K further states, runs with GRPO and with PPO train to the end and must equal the undisturbed run bit for bit.

--mutations leaves out the syncs of one call in the code, for each such call in turn, and looks for a state that breaks
a promise. It reports the kind of save and the number of states. Exits with 0 only if every call has such a state.
"""

import argparse
import logging
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from functools import cache
from pathlib import Path

import torch

from rlhf.checkpoint.start import domains
from tests.support.power_cut_finishes import finishes
from tests.support.power_cut_mutations import MUTATIONS, calls_before_a_rename, hunt, sync_calls
from tests.support.power_cut_records import ALL_KINDS, Record, records_of
from tests.support.power_cut_replay import Report, replay
from tests.support.recorded_files import Site


def in_a_process(job: tuple[str, int, int, str]) -> Report:
    """Record one kind of save, and replay its states."""
    kind, wanted, seed, folder = job
    quiet()
    try:
        records = records_of(kind, Path(folder), seed)
    except Exception:
        return Report(kind, failures=[f"{kind} cannot be recorded: {traceback.format_exc()}"])
    reports = [replay(made, -(-wanted // len(records)), seed) for made in records]
    return Report(
        kind,
        sum(report.operations for report in reports),
        sum(report.states for report in reports),
        sum(report.trees for report in reports),
        sum(report.seconds for report in reports),
        [failure for report in reports for failure in report.failures],
    )


@cache
def own_folder(folder: str) -> Path:
    """Return this process's folder, inside the common folder."""
    return Path(tempfile.mkdtemp(dir=folder))


@cache
def own_records(kind: str, seed: int, folder: str) -> list[Record]:
    """Return the records of a kind. Each process makes its own, because configurations contain the folder."""
    quiet()
    return records_of(kind, own_folder(folder), seed)


def calls_in(job: tuple[str, int, str]) -> tuple[str, Counter[Site]]:
    """Return how often each call syncs in the records of a kind."""
    return job[0], Counter(site for made in own_records(*job) for op in made.ops for site in set(op.sites))


def caught(job: tuple[Site, str, list[str], int, str]) -> tuple[Site, str, str | None, int]:
    """Return the first failure that a mutation causes in the records of `kinds`, and the number of states tried."""
    call, mutation, kinds, seed, folder = job
    records = [made for kind in kinds for made in own_records(kind, seed, folder)]
    # Try the records with the fewest other operations first.
    records.sort(key=lambda made: sum(call not in op.sites for op in made.ops))
    failure, tried = hunt(records, call, mutation, random.Random(f"{call} {seed}"))
    return call, mutation, failure, tried


def mutate(kinds: list[str], seed: int, jobs: int, folder: Path) -> bool:
    """Leave out the syncs of each call in turn, then delay them. Return whether each mutation breaks a promise."""
    started, seen = time.monotonic(), dict[str, Counter[Site]]()
    with multiprocessing.Pool(jobs) as pool:
        for kind, counts in pool.imap_unordered(calls_in, [(kind, seed, str(folder)) for kind in kinds]):
            seen[kind] = counts
        print_line(f"{len(kinds)} kinds recorded in {time.monotonic() - started:.0f} s")
        wanted = []
        for call in sync_calls():
            having = [kind for kind in kinds if seen[kind][call]]
            wanted += [(call, mutation, having, seed, str(folder)) for mutation in MUTATIONS if applies(call, mutation)]
        survived = 0
        for call, mutation, failure, tried in pool.imap_unordered(caught, wanted):
            survived += failure is None
            place = f"{call[0]}:{call[1]} {mutation}"
            if failure is None:
                having = [kind for kind in kinds if seen[kind][call]]
                what = "SURVIVED" if tried else "NOT TRIED"
                print_line(f"{what}: {place}: {tried} states of {', '.join(having) or 'no kind'}")
            else:
                where, what, *_ = failure.splitlines()
                print_line(f"caught: {place}: by {where.split(',')[0]} after {tried} states: {what.strip()[:150]}")
    print_line(f"{len(wanted) - survived} of {len(wanted)} mutations caught in {time.monotonic() - started:.0f} s")
    return not survived


def applies(call: Site, mutation: str) -> bool:
    """Return whether `mutation` applies to `call`. A late sync matters only if the same function renames after it."""
    return mutation == "left out" or call in calls_before_a_rename()


def quiet() -> None:
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    domains.LOOK_AGAIN_S = 0.001  # no folder in this test shows a file late


def print_line(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def campaign(kinds: list[str], wanted: int, seed: int, jobs: int, folder: Path) -> bool:
    """Replay `wanted` states over all `kinds`. Return whether every state kept the promises."""
    each = -(-wanted // len(kinds))
    started, reports = time.monotonic(), list[Report]()
    with multiprocessing.Pool(jobs, maxtasksperchild=1) as pool:
        for report in pool.imap_unordered(in_a_process, [(kind, each, seed, str(folder)) for kind in kinds]):
            reports.append(report)
            print_line(
                f"{report.kind:18} {report.operations:5} operations {report.states:7} states "
                f"({report.trees} different trees) in {report.seconds:.0f} s"
            )
            for failure in report.failures:
                print_line(f"FAILED: {failure}")
    total = sum(report.states for report in reports)
    print_line(f"{total} states of {len(kinds)} kinds in {time.monotonic() - started:.0f} s")
    return not any(report.failures for report in reports)


def finish(count: int, seed: int, jobs: int, folder: Path) -> bool:
    """Train to the end in `count` states. Return whether each run equals the undisturbed run."""
    started, wrong = time.monotonic(), 0
    for text, found in finishes(count, seed, jobs, folder / "finish"):
        wrong += bool(found)
        for line in found:
            print_line(f"FAILED: {text}: {line}")
    print_line(
        f"{count - wrong} of {count} finished runs equal the undisturbed one, in {time.monotonic() - started:.0f} s"
    )
    return not wrong


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.power_cuts", description=__doc__)
    parser.add_argument("--states", type=int, default=2000, help="states in all, over all kinds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", nargs="+", choices=ALL_KINDS, default=ALL_KINDS, metavar="KIND")
    parser.add_argument("--finish", type=int, default=10, help="states of real training, which goes on to its end")
    parser.add_argument("--mutations", action="store_true", help="leave out each sync of the code in turn")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    arguments = parser.parse_args()
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="rlhf-power-cuts-", dir=memory if memory.is_dir() else None))
    try:
        if arguments.mutations:
            whole = mutate(arguments.kinds, arguments.seed, arguments.jobs, folder)
        else:
            whole = campaign(arguments.kinds, arguments.states, arguments.seed, arguments.jobs, folder)
            if arguments.finish:
                whole &= finish(arguments.finish, arguments.seed, arguments.jobs, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
