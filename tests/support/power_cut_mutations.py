"""Finds the project's sync calls, removes one call's syncs from records, and yields the states that a power cut can
leave only without these syncs."""

import ast
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import rlhf
from tests.support.power_cut_kinds import REMOTE
from tests.support.power_cut_records import Record
from tests.support.power_cut_replay import Bench
from tests.support.power_cut_states import Change, Disk, Node, Tree, extremes, torn
from tests.support.recorded_files import Op, Site

TRIED = 2000
"""Up to this many states are searched for a promise that a missing call breaks."""
SINGLES = 4
"""At each point, at most this many changes of names, and as many of contents, are lost one at a time."""
DRAWN = 4
"""Number of states drawn per point."""

ROOT = Path(rlhf.__file__).parent


WITHOUT_STATE = {
    "ranks/lock.py",  # shows a lock's owner to other nodes of a network file system; no lock outlives a power cut
    "diagnosis/disk_checks.py",  # measures a disk with a file that it removes
}
"""Files whose syncs protect nothing from a power cut."""


def sync_calls() -> list[Site]:
    """Return every call of `fsync`, `fsync_...` and `..._durably`, of any module or object."""
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        if path.relative_to(ROOT).as_posix() in WITHOUT_STATE:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if name in ("fsync", "fdatasync") or name.startswith("fsync_") or name.endswith("_durably"):
                    found.append((str(path.relative_to(ROOT)), node.lineno, node.col_offset))
    return found


def calls_before_a_rename() -> list[Site]:
    """Return the calls of `os.fsync` in functions that rename a file afterwards."""
    tree = ast.parse((ROOT / "storage" / "files.py").read_text())
    found = []
    for function in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
        text = ast.unparse(function)
        if "fsync(file" in text and ".replace(path)" in text:
            calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
            fsyncs = [node for node in calls if isinstance(node.func, ast.Attribute) and node.func.attr == "fsync"]
            found += [("storage/files.py", node.lineno, node.col_offset) for node in fsyncs]
    return found


def without(ops: list[Op], call: Site) -> list[Op]:
    """Return the operations as if `call` synced nothing. Their count stays the same, so points keep their numbers."""
    return [replace(op, kind="nothing") if call in op.sites else op for op in ops]


def after_the_rename(ops: list[Op], call: Site) -> list[Op]:
    """Return the operations with each file sync by `call` moved after the file's rename."""
    moved = list(ops)
    for number, op in enumerate(ops[:-1]):
        rename = ops[number + 1]
        if op.kind == "sync" and call in op.sites and rename.kind == "rename" and rename.path == op.path:
            moved[number : number + 2] = [rename, replace(op, path=rename.other)]
    return moved


MUTATIONS = {"left out": without, "after the rename": after_the_rename}


def hunt(records: list[Record], call: Site, mutation: str, rng: random.Random) -> tuple[str | None, int]:
    """Search the mutated records for a state that breaks a promise, the likeliest states of all records first.

    Returns the first failure or None, and the number of states checked.
    """
    mutants = [replace(made, ops=MUTATIONS[mutation](made.ops, call)) for made in records]
    benches = [Bench(mutant) for mutant in mutants]
    try:
        idle = 0
        for depth in range(TRIED):
            before = sum(bench.states for bench in benches)
            for made, bench in zip(records, benches, strict=True):
                for moment, tree in only_without(made, bench.made.ops, depth, rng):
                    if not bench.check(moment, tree, every=2):
                        return bench.failures[0], sum(bench.states for bench in benches)
                    if sum(bench.states for bench in benches) >= TRIED:
                        return None, TRIED
            tried = sum(bench.states for bench in benches)
            # A random state may repeat an earlier one: only many repeats in a row show that no new states are left.
            idle = idle + 1 if tried == before else 0
            if idle > 30:
                break
        return None, tried
    finally:
        for bench in benches:
            bench.close()


def only_without(made: Record, ops: list[Op], depth: int, rng: random.Random) -> Iterator[tuple[int, Tree]]:
    """Yield states that a power cut may leave of `ops` but not of the record, point after point.

    First lose all changes that are durable in the record but not with `ops`, then single ones, then random ones.
    """
    disk, mutant = Disk([REMOTE]), Disk([REMOTE])
    for moment, (op, other) in enumerate(zip(made.ops, ops, strict=True), 1):
        disk.apply(op)
        mutant.apply(other)
        if moment < made.first:
            continue
        anyway = [{each.number for each in group} for group in disk.uncertain()]
        changes, files = mutant.uncertain()
        lost = [change for change in changes if change.number not in anyway[0]]
        dirty = [node for node in files if node.number not in anyway[1]]
        if lost or dirty:
            for tree in _trees(mutant, changes, files, lost, dirty, depth, rng):
                yield moment, tree


def _trees(
    disk: Disk,
    changes: list[Change],
    files: list[Node],
    lost: list[Change],
    dirty: list[Node],
    depth: int,
    rng: random.Random,
) -> Iterator[Tree]:
    new = {id(node): node.content for node in files}

    def tree(gone: set[int], contents: dict[int, bytes]) -> Tree:
        return disk.tree(lambda change: id(change) in gone, lambda node: (new | contents)[id(node)])

    if depth == 0:
        yield tree({id(change) for change in lost}, {id(node): node.synced for node in dirty})
        yield tree(set(), {id(node): extremes(node)[-2] for node in dirty})
    elif depth == 1:
        for change in rng.sample(lost, min(len(lost), SINGLES)):
            yield tree({id(change)}, {})
        for node in rng.sample(dirty, min(len(dirty), SINGLES)):
            yield tree(set(), {id(node): rng.choice([node.synced, *extremes(node)])})
    else:
        for _ in range(DRAWN):
            share = rng.choice((0.0, 0.1, 0.5, 0.9))
            gone = {id(change) for change in changes if rng.random() < share}
            gone |= {id(change) for change in lost if rng.random() < 0.5}
            yield tree(gone, {id(node): torn(node, rng) for node in files if node in dirty or rng.random() < share})
