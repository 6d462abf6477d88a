"""python -m tests.faults.power_cuts --states N --seed S [--kinds KIND ...]: does a power cut ever cost what was saved?

Records the file operations of real saves of every kind, builds states that a power cut may leave of them
(`tests.support.power_cut_states`), and gives the command again in each: it must find the newest checkpoint that it was
told is saved, or a later one, whole, with its history and journal, and save from there. Exit code 0 only when all do.

With --mutations, the syncs of one call in the code are left out of the records, for each such call in turn, and a state
must be found that breaks a promise. Exit code 0 only when there is one for every call.
"""

import argparse
import logging
import multiprocessing
import os
import random
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from rlhf.checkpoint.start import domains
from tests.support.power_cut_checks import wrong
from tests.support.power_cut_kinds import KINDS, REMOTE, restarted
from tests.support.power_cut_mutations import after_the_rename, calls_before_a_rename, sync_calls, without
from tests.support.power_cut_runs import Book, Promises, Saved, promises_at
from tests.support.power_cut_states import Disk, Shelf, Tree, states
from tests.support.recorded_files import Op, Recorder, Site, recording

SHOWN = 3
"""Failures of a kind that are reported; after them it ends."""

KILLED_PREFIX = "killed_"
KILLED = ("behind", "retention", "journal", "fork", "damaged", "domains")
ALL_KINDS = [*KINDS, *(f"{KILLED_PREFIX}{kind}" for kind in KILLED)]
KILLS = 8
LEAST = 12
"""About as many states of a moment are looked at first; when they were all there are, of fewer moments."""
TRIED = 2000
"""States of a record in which a mutation is looked for."""
MUTATIONS = {"left out": without, "after the rename": after_the_rename}
GO_ON = 4
"""In every so many states the start takes a further step and saves it."""


@dataclass(frozen=True)
class Record:
    """The operations of a kind, and the notes of what was promised at which of them."""

    kind: str
    root: Path
    ops: list[Op]
    notes: list[tuple[int, str, Any]]
    saves: dict[int, Saved]
    first: int = 0
    """The moments before it are of another record."""


@dataclass
class Report:
    """How the states of a kind have fared."""

    kind: str
    operations: int = 0
    states: int = 0
    trees: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)


def record(kind: str, folder: Path) -> Record:
    """Run `kind` in a new folder below `folder`, and note all that it does to files."""
    root = folder / kind / "disk"
    root.mkdir(parents=True)
    with recording(root) as recorder:
        book = Book(recorder)
        KINDS[kind](root, book)
    return proven(Record(kind, root, recorder.ops, book.notes, book.saves), recorder)


def proven(made: Record, recorder: Recorder) -> Record:
    """`made`, if nothing has gone past the recorder."""
    assert not recorder.missed, f"{made.kind}: not recorded: {recorder.missed}"
    differing = compare(after(made.ops), made.root)
    assert not differing, f"{made.kind}: the record does not lead to what is there: {differing}"
    return made


def after(ops: list[Op]) -> Tree:
    """What is there after `ops` while the power is on."""
    disk = Disk([REMOTE])
    for op in ops:
        disk.apply(op)
    return disk.tree(lambda change: False, lambda node: node.content)


def killed(made: Record, rng: random.Random, points: int) -> list[Record]:
    """The record up to a kill, followed by that of the start after it, for `points` kills before a sync.

    What is not synced then is seen by that start and lost with the power after it.
    """
    starts = next(number for number, what, _ in made.notes if what == "begun")
    before_syncs = [i for i, op in enumerate(made.ops) if op.kind.startswith("sync") and i >= starts]
    named = [i for i in before_syncs if made.ops[i].kind == "sync_dir" and "/.tmp-" not in made.ops[i].path]
    chosen = set(rng.sample(named, min(len(named), points // 2)))
    chosen |= set(rng.sample([i for i in before_syncs if i not in chosen], points - len(chosen)))
    records = []
    for moment in sorted(chosen):
        promises = promises_at(made.notes, moment)
        shutil.rmtree(made.root)
        Shelf(made.root.parent / f"shelf-{moment}").build(after(made.ops[:moment]), made.root, lambda path: False)
        notes = [note for note in made.notes if note[0] <= moment]
        with recording(made.root) as recorder:
            book = Book(recorder, made.saves, earlier=moment)
            restarted(promises.start, book, short_of_room=moment in named)
        record = Record(made.kind, made.root, made.ops[:moment] + recorder.ops, notes + book.notes, book.saves)
        records.append(proven(replace(record, first=moment), recorder))
    return records


def compare(tree: Tree, root: Path) -> list[str]:
    """Paths at which the folder `root` is not `tree`."""
    there = {str(path.relative_to(root)): path for path in root.rglob("*")}
    return sorted(there.keys() ^ tree.keys()) + [
        name
        for name, path in there.items()
        if name in tree and isinstance(tree[name], bytes) and path.read_bytes() != tree[name]
    ]


def moments(made: Record, wanted: int, share: float, rng: random.Random) -> Iterator[tuple[int, Promises, Tree]]:
    """About `wanted` states of each moment of the record, or of a share of them, with what was promised by then."""
    disk = Disk([REMOTE])
    for moment in range(len(made.ops) + 1):
        if moment:
            disk.apply(made.ops[moment - 1])
        if moment >= made.first and rng.random() < share:
            promises = promises_at(made.notes, moment)
            for tree in states(disk, wanted, rng):
                # The lease there names this process, which lives on; that of a machine that has died ends by itself.
                yield moment, promises, {path: tree[path] for path in tree if not path.endswith("/lease.json")}


def replay(made: Record, wanted: int, seed: int, *, at_most: int = SHOWN, dense: bool = False) -> Report:
    """Check about `wanted` different states; ends with the failure number `at_most`. `dense`: of every moment some,
    as far as they go."""
    report, started, rng = Report(made.kind, len(made.ops)), time.monotonic(), random.Random(f"{made.kind} {seed}")
    shelf = Shelf(made.root.parent / f"shelf-{seed}")
    seen: set[tuple[int, int]] = set()
    each, share = 4, 1.0 if dense else wanted / (LEAST * (len(made.ops) - made.first + 1))
    while report.states < wanted and len(report.failures) < at_most:
        before = report.states
        for moment, promises, tree in moments(made, each, share, rng):
            key = hash(frozenset(tree.items())), sum(number <= moment for number, *_ in made.notes)
            if key in seen:
                continue
            seen.add(key)
            report.states += 1
            shutil.rmtree(made.root, ignore_errors=True)
            shelf.build(tree, made.root, lambda path: "global_step_" in path)
            if found := wrong(promises, made.root, go_on=report.states % GO_ON == 1):
                report.failures.append(describe(made, moment, tree, found))
            if len(report.failures) == at_most or report.states == wanted:
                break
        if report.states == before and share >= 1:
            break
        each, share = 2 * each, 2 * share
    report.trees, report.seconds = len({tree for tree, _ in seen}), time.monotonic() - started
    report.failures += [f"{path} was written to" for path in shelf.changed()]
    shutil.rmtree(shelf.folder)
    return report


def describe(made: Record, moment: int, tree: Tree, found: list[str]) -> str:
    """A failure in lines."""
    last = [f"{op.kind} {op.path} {op.other}" for op in made.ops[max(0, moment - 3) : moment]]
    names = [f"{path} {len(content)}" if isinstance(content, bytes) else path for path, content in tree.items()]
    shown = [name for name in names if not re.search(r"/(global_step_|\.t|\.u).*/", name)]
    return "\n  ".join([f"{made.kind}, after operation {moment}: {'; '.join(last)}", *found, "in " + ", ".join(shown)])


def in_a_process(job: tuple[str, int, int, str]) -> Report:
    """Record and replay one kind."""
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


def records_of(kind: str, folder: Path, seed: int) -> list[Record]:
    """The record of a kind; for one that is killed, those of the starts after some kills."""
    if kind in KINDS:
        return [record(kind, folder)]
    made = record(kind.removeprefix(KILLED_PREFIX), folder / "killed")
    return killed(replace(made, kind=kind), random.Random(f"{kind} {seed}"), KILLS)


def calls_in(job: tuple[str, int, str]) -> tuple[str, Counter[Site]]:
    """How often each call syncs in the records of a kind."""
    kind, seed, folder = job
    quiet()
    records = records_of(kind, Path(folder) / "all", seed)
    return kind, Counter(site for made in records for op in made.ops for site in set(op.sites))


def caught(job: tuple[Site, str, list[str], int, str]) -> tuple[Site, str, str]:
    """The first failure of a mutation, of the named kinds; with none the number of states that were all well."""
    call, mutation, kinds, seed, folder = job
    quiet()
    tried = 0
    for kind in kinds:
        for made in records_of(kind, Path(folder) / f"{call[0].replace('/', '.')}-{call[1]}-{mutation}", seed):
            ops = MUTATIONS[mutation](made.ops, call)
            changed = [number for number, (one, other) in enumerate(zip(ops, made.ops, strict=True)) if one != other]
            if not changed:
                continue
            mutant = replace(made, ops=ops, first=max(made.first, changed[0]))
            report = replay(mutant, TRIED, seed, at_most=1, dense=True)
            tried += report.states
            if report.failures:
                return call, mutation, report.failures[0]
    return call, mutation, f"{tried} states of {', '.join(kinds) or 'no kind'} and no failure"


def mutate(kinds: list[str], seed: int, jobs: int, folder: Path) -> bool:
    """Leave out the syncs of each call in turn, then make them late; whether a promise breaks every time."""
    started, seen = time.monotonic(), dict[str, Counter[Site]]()
    with multiprocessing.Pool(jobs, maxtasksperchild=1) as pool:
        for kind, counts in pool.imap_unordered(calls_in, [(kind, seed, str(folder)) for kind in kinds]):
            seen[kind] = counts
        wanted = []
        for call in sync_calls():
            # Those first that have little else in them.
            having = sorted((kind for kind in seen if seen[kind][call]), key=lambda kind: sum(seen[kind].values()))
            wanted += [(call, mutation, having, seed, str(folder)) for mutation in MUTATIONS if applies(call, mutation)]
        survived = 0
        for call, mutation, outcome in pool.imap_unordered(caught, wanted):
            broken = not outcome.endswith("no failure")
            survived += not broken
            place, verdict = ":".join(map(str, call[:2])), "caught" if broken else "SURVIVED"
            say(f"{verdict}: {place} {mutation}: {' '.join(outcome.splitlines()[:2])[:200]}")
    say(f"{len(wanted) - survived} of {len(wanted)} mutations caught in {time.monotonic() - started:.0f} s")
    return not survived


def applies(call: Site, mutation: str) -> bool:
    """Late syncs have a meaning where a file is renamed behind its sync: in one function of all."""
    return mutation == "left out" or call in calls_before_a_rename()


def quiet() -> None:
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    domains.LOOK_AGAIN_S = 0.001  # no folder here shows a file late


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def campaign(kinds: list[str], wanted: int, seed: int, jobs: int, folder: Path) -> bool:
    """Replay `wanted` states over all `kinds`; whether every one kept what was promised."""
    each = -(-wanted // len(kinds))
    started, reports = time.monotonic(), list[Report]()
    with multiprocessing.Pool(jobs, maxtasksperchild=1) as pool:
        for report in pool.imap_unordered(in_a_process, [(kind, each, seed, str(folder)) for kind in kinds]):
            reports.append(report)
            say(
                f"{report.kind:18} {report.operations:5} operations {report.states:7} states "
                f"({report.trees} different trees) in {report.seconds:.0f} s"
            )
            for failure in report.failures:
                say(f"FAILED: {failure}")
    total = sum(report.states for report in reports)
    say(f"{total} states of {len(kinds)} kinds in {time.monotonic() - started:.0f} s")
    return not any(report.failures for report in reports)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.power_cuts", description=__doc__)
    parser.add_argument("--states", type=int, default=2000, help="states in all, over all kinds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", nargs="+", choices=ALL_KINDS, default=ALL_KINDS, metavar="KIND")
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
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
