"""Records each kind of save, to its end or beyond a kill."""

import random
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhf.checkpoint.remote.lease import release_leases
from tests.support.power_cut_kinds import KINDS, REMOTE, restarted
from tests.support.power_cut_runs import Book, Saved, promises_at
from tests.support.power_cut_states import Disk, Shelf, Tree
from tests.support.recorded_files import Op, Recorder, Site, recording

KILLED_PREFIX = "killed_"
KILLED = ("behind", "retention", "journal", "fork", "damaged", "domains")
ALL_KINDS = [*KINDS, *(f"{KILLED_PREFIX}{kind}" for kind in KILLED)]


@dataclass(frozen=True)
class Record:
    """The operations of a kind of save, with notes of each promise at its operation."""

    kind: str
    root: Path
    ops: list[Op]
    notes: list[tuple[int, str, Any]]
    saves: dict[int, Saved]
    first: int = 0
    """Points before this number belong to another record."""


def record(kind: str, folder: Path) -> Record:
    """Run `kind` in a new folder below `folder` and record its file operations."""
    root = folder / kind / "disk"
    root.mkdir(parents=True)
    with recording(root) as recorder:
        book = Book(recorder)
        KINDS[kind](root, book)
    release_leases()
    return verified(Record(kind, root, recorder.ops, book.notes, book.saves), recorder)


def verified(made: Record, recorder: Recorder) -> Record:
    """Return `made` after checking that the recorder missed no change."""
    assert not recorder.missed, f"{made.kind}: not recorded: {recorder.missed}"
    differing = compare(after(made.ops), made.root)
    assert not differing, f"{made.kind}: the recorded operations give other content than the folder has: {differing}"
    return made


def after(ops: list[Op]) -> Tree:
    """Return the tree after `ops` without a power cut."""
    disk = Disk([REMOTE])
    for op in ops:
        disk.apply(op)
    return disk.tree(lambda change: False, lambda node: node.content)


def killed(made: Record, rng: random.Random) -> list[Record]:
    """Return a record per sync call: up to a kill before one of the call's syncs (drawn by `rng`), then the next start.

    The next start reads changes that the killed process did not sync, and a later power cut could lose them. A start
    therefore syncs such changes. In one of the records, each of these syncs has something to make durable.
    """
    starts = next(number for number, what, _ in made.notes if what == "begun")
    by_call: dict[tuple[Site, ...], list[int]] = {}
    for number, op in enumerate(made.ops):
        if op.kind.startswith("sync") and number >= starts:
            by_call.setdefault(op.sites, []).append(number)
    chosen = sorted(rng.choice(numbers) for numbers in by_call.values())
    records = []
    for moment in chosen:
        promises = promises_at(made.notes, moment)
        shutil.rmtree(made.root)
        Shelf(made.root.parent / f"shelf-{moment}").build(after(made.ops[:moment]), made.root, lambda path: False)
        notes = [note for note in made.notes if note[0] <= moment]
        with recording(made.root) as recorder:
            book = Book(recorder, made.saves, earlier=moment)
            restarted(promises.start, book, short_of_room=_is_of_a_name(made.ops[moment]))
        record = Record(made.kind, made.root, made.ops[:moment] + recorder.ops, notes + book.notes, book.saves)
        records.append(verified(replace(record, first=moment), recorder))
    return records


def _is_of_a_name(sync: Op) -> bool:
    """Return whether `sync` makes a published name durable."""
    return sync.kind == "sync_dir" and "/.tmp-" not in sync.path


def compare(tree: Tree, root: Path) -> list[str]:
    """Return the paths at which the folder `root` differs from `tree`."""
    there = {str(path.relative_to(root)): path for path in root.rglob("*")}
    return sorted(there.keys() ^ tree.keys()) + [
        name
        for name, path in there.items()
        if name in tree and isinstance(tree[name], bytes) and path.read_bytes() != tree[name]
    ]


def records_of(kind: str, folder: Path, seed: int) -> list[Record]:
    """Return the record of a kind; for a killed kind, the records of starts after some kills."""
    if kind in KINDS:
        return [record(kind, folder)]
    made = record(kind.removeprefix(KILLED_PREFIX), folder / "killed")
    return killed(replace(made, kind=kind), random.Random(f"{kind} {seed}"))
