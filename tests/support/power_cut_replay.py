"""Checks the states that a record may leave behind, each in the recorded folder."""

import hashlib
import random
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rlhf.checkpoint.remote.lease import release_leases
from tests.support.power_cut_checks import wrong
from tests.support.power_cut_kinds import REMOTE
from tests.support.power_cut_records import Record
from tests.support.power_cut_runs import promises_at
from tests.support.power_cut_states import Disk, Shelf, Tree, states

SHOWN = 3
"""Number of failures of a kind to report before the check ends."""
LEAST = 12
"""Least number of states to check per point; few wanted states mean fewer points."""
GO_ON = 4
"""In every `GO_ON`th state, the start also runs and saves a further step."""


@dataclass
class Report:
    """Results of checking the states of a kind."""

    kind: str
    operations: int = 0
    states: int = 0
    trees: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)


class Bench:
    """The folder of a record, in which different states are checked one after the other."""

    def __init__(self, made: Record) -> None:
        self.made, self.states, self.failures = made, 0, list[str]()
        self._shelf = Shelf(Path(tempfile.mkdtemp(prefix="shelf-", dir=made.root.parent)) / "files")
        self._seen: set[tuple[bytes, int]] = set()

    def check(self, moment: int, tree: Tree, *, every: int = GO_ON) -> bool:
        """Run the command again in `tree` unless checked already; in each `every`th state, save a further step.

        Returns whether all promises hold.
        """
        # The lease names this live process; a dead machine's lease would expire.
        tree = {path: tree[path] for path in tree if not path.endswith("/lease.json")}
        key = fingerprint(tree), sum(number <= moment for number, *_ in self.made.notes)
        if key in self._seen:
            return True
        self._seen.add(key)
        self.states += 1
        root = self.made.root
        shutil.rmtree(root, ignore_errors=True)
        self._shelf.build(tree, root, lambda path: "global_step_" in path)
        try:
            found = wrong(promises_at(self.made.notes, moment), root, go_on=self.states % every == 1 % every)
        finally:
            # Otherwise its renewal would write to the folder of later states.
            release_leases()
        if found:
            self.failures.append(describe(self.made, moment, tree, found))
        return not found

    def close(self) -> None:
        """Check that no process changed a published file, and remove the shelf."""
        self.failures += [f"{path} was written to" for path in self._shelf.changed()]
        shutil.rmtree(self._shelf.folder.parent)

    @property
    def trees(self) -> int:
        return len({tree for tree, _ in self._seen})


def fingerprint(tree: Tree) -> bytes:
    """Return a hash of `tree`."""
    digest = hashlib.blake2b(digest_size=16)
    for path, content in tree.items():
        digest.update(f"{path}\0{len(content) if isinstance(content, bytes) else content}\0".encode())
        if isinstance(content, bytes):
            digest.update(content)
    return digest.digest()


def moments(made: Record, wanted: int, share: float, rng: random.Random) -> Iterator[tuple[int, Tree]]:
    """Yield about `wanted` states of each point of the record, or of a fraction of the points."""
    disk = Disk([REMOTE])
    for moment in range(len(made.ops) + 1):
        if moment:
            disk.apply(made.ops[moment - 1])
        if moment >= made.first and rng.random() < share:
            for tree in states(disk, wanted, rng):
                yield moment, tree


def replay(made: Record, wanted: int, seed: int) -> Report:
    """Check about `wanted` different states, and stop at failure number `SHOWN`."""
    started, rng, bench = time.monotonic(), random.Random(f"{made.kind} {seed}"), Bench(made)
    each, share = 4, wanted / (LEAST * (len(made.ops) - made.first + 1))
    while bench.states < wanted and len(bench.failures) < SHOWN:
        before = bench.states
        for moment, tree in moments(made, each, share, rng):
            bench.check(moment, tree)
            if len(bench.failures) == SHOWN or bench.states == wanted:
                break
        if bench.states == before and share >= 1:
            break
        each, share = 2 * each, 2 * share
    bench.close()
    return Report(made.kind, len(made.ops), bench.states, bench.trees, time.monotonic() - started, bench.failures)


def describe(made: Record, moment: int, tree: Tree, found: list[str]) -> str:
    """Describe a failure in lines."""
    last = [f"{op.kind} {op.path} {op.other}" for op in made.ops[max(0, moment - 3) : moment]]
    names = [f"{path} {len(content)}" if isinstance(content, bytes) else path for path, content in tree.items()]
    shown = [name for name in names if not re.search(r"/(global_step_|\.t|\.u).*/", name)]
    return "\n  ".join([f"{made.kind}, after operation {moment}: {'; '.join(last)}", *found, "in " + ", ".join(shown)])
