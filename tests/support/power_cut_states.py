"""Generates the states that a power cut may leave of recorded file operations, by the guarantees of POSIX alone.

- A file has the bytes of its last fsync. Each 4 KiB block changed since has its old bytes, its new bytes, or zeros if
  it was cut off or new. The file's length is anywhere between its smallest and largest length since.
- A directory has the names of its last fsync. Any subset of the changes since (a name created, removed, or atomically
  renamed) may have happened, in any order. Neither a file's nor a directory's own fsync makes its name durable.

File systems allow fewer states: ext4 (data=ordered, with delayed allocation) and XFS order changes of names, and write
a new size only after the data. So checks of all states here cover them.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from tests.support.recorded_files import Op

BLOCK = 4096
EXHAUSTIVE = 64
"""If a point has at most this many states, all are built; otherwise some are drawn."""


@dataclass(eq=False)
class Change:
    """A change of a directory: a name that `node` gets, and a name that it loses.

    A rename between directories is one change per directory, an exchange one per node. The two happen atomically.
    """

    node: "Node"
    given: str | None
    removed: str | None
    number: int
    """Number of the operation."""
    other: "tuple[Node, Change] | None" = None
    follows: bool = False
    """Whether the `other` change decides whether both changes are lost."""

    @property
    def decides(self) -> "Change":
        return self.other[1] if self.follows and self.other is not None else self


@dataclass(eq=False)
class Node:
    """A file or a directory: its present state, its synced state, and the changes since."""

    is_dir: bool
    number: int = 0
    """Number of the operation that created it."""
    content: bytes = b""
    synced: bytes = b""
    lengths: list[int] = field(default_factory=lambda: [0])
    """Lengths of a file since its last sync."""
    names: dict[str, "Node"] = field(default_factory=dict)
    durable: dict[str, "Node"] = field(default_factory=dict)
    pending: list[Change] = field(default_factory=list)

    @property
    def dirty(self) -> bool:
        return self.content != self.synced


Tree = dict[str, "bytes | Link | None"]
"""Each path with a file's bytes, None for a directory, or a `Link`."""


@dataclass(frozen=True)
class Link:
    """Another name of the file at `path`."""

    path: str


class Disk:
    """The recorded folder, operation by operation. `safe` folders simulate a machine without power cut."""

    def __init__(self, safe: Sequence[str] = ()) -> None:
        self.root, self._safe, self._number = Node(is_dir=True), tuple(safe), 0

    def apply(self, op: Op) -> None:
        """Apply `op`."""
        self._number += 1
        if op.kind == "nothing":
            return
        getattr(self, f"_do_{op.kind}")(op, *self._parent(op.path))
        if op.path.startswith(self._safe) and self._safe:
            self._save(op)

    def _do_create(self, op: Op, parent: Node, name: str) -> None:
        self._change(parent, Node(False, self._number), name, None)

    def _do_mkdir(self, op: Op, parent: Node, name: str) -> None:
        self._change(parent, Node(True, self._number), name, None)

    def _do_write(self, op: Op, parent: Node, name: str) -> None:
        if (node := parent.names.get(name)) is not None:  # else its name was removed while it was open
            content = node.content.ljust(op.offset, b"\0")
            node.content = content[: op.offset] + op.data + content[op.offset + len(op.data) :]
            node.lengths.append(len(node.content))

    def _do_truncate(self, op: Op, parent: Node, name: str) -> None:
        if (node := parent.names.get(name)) is not None:
            node.content = node.content[: op.offset].ljust(op.offset, b"\0")
            node.lengths.append(len(node.content))

    def _do_sync(self, op: Op, parent: Node, name: str) -> None:
        if (node := parent.names.get(name)) is not None:
            self._sync_file(node)

    def _do_sync_dir(self, op: Op, parent: Node, name: str) -> None:
        self._sync_names(self._at(op.path))

    def _do_unlink(self, op: Op, parent: Node, name: str) -> None:
        self._change(parent, parent.names[name], None, name)

    _do_rmdir = _do_unlink

    def _do_link(self, op: Op, parent: Node, name: str) -> None:
        target, other = self._parent(op.other)
        self._change(target, parent.names[name], other, None)

    def _do_rename(self, op: Op, parent: Node, name: str) -> None:
        target, other = self._parent(op.other)
        node = parent.names[name]
        if target is parent:
            self._change(parent, node, other, name)
        else:
            there, here = self._change(target, node, other, None), self._change(parent, node, None, name)
            there.other, here.other, here.follows = (parent, here), (target, there), True

    def _do_exchange(self, op: Op, parent: Node, name: str) -> None:
        target, other = self._parent(op.other)
        assert target is parent, "an exchange between two directories"
        node, there = parent.names[name], parent.names[other]
        one, two = self._change(parent, node, other, name), self._change(parent, there, name, other)
        one.other, two.other, two.follows = (parent, two), (parent, one), True

    def _save(self, op: Op) -> None:
        for path in filter(None, (op.path, op.other)):
            parent, name = self._parent(path)
            self._sync_names(parent)
            if name in parent.names:
                self._sync_file(parent.names[name])

    def _sync_file(self, node: Node) -> None:
        node.synced, node.lengths = node.content, [len(node.content)]

    def _sync_names(self, node: Node) -> None:
        for directory, change in [change.other for change in node.pending if change.other is not None]:
            if change in directory.pending:
                directory.pending.remove(change)
                _make(directory.durable, change)
        node.durable, node.pending = dict(node.names), []

    def _change(self, parent: Node, node: Node, given: str | None, removed: str | None) -> Change:
        change = Change(node, given, removed, self._number)
        _make(parent.names, change)
        parent.pending.append(change)
        return change

    def _at(self, path: str) -> Node:
        node = self.root
        for part in PurePosixPath(path).parts:
            node = node.names[part]
        return node

    def _parent(self, path: str) -> tuple[Node, str]:
        pure = PurePosixPath(path)
        return self._at(str(pure.parent)), pure.name

    def uncertain(self) -> tuple[list[Change], list[Node]]:
        """Return the changes of names that may be lost, and the reachable files whose bytes may be lost."""
        changes, files, seen, todo = list[Change](), list[Node](), set[int](), [self.root]
        while todo:
            node = todo.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            if not node.is_dir:
                if node.dirty:
                    files.append(node)
                continue
            changes += [change for change in node.pending if not change.follows]
            todo += [*node.names.values(), *node.durable.values(), *(change.node for change in node.pending)]
        return changes, files

    def tree(self, lost: Callable[[Change], bool], bytes_of: Callable[[Node], bytes]) -> Tree:
        """Return the tree without the `lost` changes, in which dirty files contain `bytes_of` them."""
        tree: Tree = {}
        first: dict[int, str] = {}

        def walk(node: Node, prefix: str) -> None:
            names = dict(node.durable)
            for change in node.pending:
                if not lost(change.decides):
                    _make(names, change)
            for name in sorted(names):
                path, child = prefix + name, names[name]
                if child.is_dir:
                    # A directory can have only one name. If lost changes would leave two, keep the first.
                    if id(child) not in first:
                        first[id(child)] = path
                        tree[path] = None
                        walk(child, f"{path}/")
                elif id(child) in first:
                    tree[path] = Link(first[id(child)])
                else:
                    first[id(child)] = path
                    tree[path] = bytes_of(child) if child.dirty else child.content

        walk(self.root, "")
        return tree


def _make(names: dict[str, Node], change: Change) -> None:
    if change.removed is not None and names.get(change.removed) is change.node:
        del names[change.removed]
    if change.given is not None:
        if change.node.is_dir:
            for name in [name for name, node in names.items() if node is change.node]:
                del names[name]
        names[change.given] = change.node


def torn(node: Node, rng: random.Random) -> bytes:
    """Draw the bytes of a dirty file."""
    low, high = min([len(node.synced), *node.lengths]), max([len(node.synced), *node.lengths])
    cut = min(node.lengths)
    size = rng.choice((low, high, len(node.content), rng.randint(low, high)))
    found = bytearray()
    for start in range(0, size, BLOCK):
        old = node.synced[start : start + BLOCK].ljust(BLOCK, b"\0")
        new = node.content[start : start + BLOCK].ljust(BLOCK, b"\0")
        zero = bytes(BLOCK) if start + BLOCK > min(cut, len(node.synced)) else old
        if zero is not old and start < min(cut, len(node.synced)):
            kept = min(cut, len(node.synced)) - start  # bytes that were never cut off stay old
            zero = old[:kept].ljust(BLOCK, b"\0")
        found += rng.choice((old, new, zero))
    return bytes(found[:size])


def extremes(node: Node) -> list[bytes]:
    """Return a dirty file's old bytes, new bytes, zeros and half of the new bytes, as far as they differ."""
    zeros = node.synced[: min([*node.lengths, len(node.synced)])].ljust(len(node.content), b"\0")
    half = (len(node.synced) + len(node.content)) // 2
    return list(dict.fromkeys([node.synced, node.content, zeros, node.content[:half]]))


def states(disk: Disk, wanted: int, rng: random.Random) -> Iterator[Tree]:
    """Yield all states of this point if they are few, else about `wanted`: extremes, then draws, which may repeat."""
    changes, files = disk.uncertain()
    count = 2 ** len(changes) * 4 ** len(files)
    if count <= EXHAUSTIVE:
        yield from _all(disk, changes, files)
        return
    new = {id(node): node.content for node in files}
    old = {id(node): node.synced for node in files}
    yield disk.tree(lambda change: False, lambda node: new[id(node)])
    yield disk.tree(lambda change: True, lambda node: old[id(node)])
    # All new names but no new bytes, and the reverse.
    zeros = {id(node): extremes(node)[-2] for node in files}
    yield disk.tree(lambda change: False, lambda node: old[id(node)])
    yield disk.tree(lambda change: False, lambda node: zeros[id(node)])
    yield disk.tree(lambda change: True, lambda node: new[id(node)])
    singles: list[tuple[Change, bool]] = [(change, only) for change in changes for only in (True, False)]
    rng.shuffle(singles)
    for change, only in singles[: wanted // 2]:
        yield disk.tree(lambda other, c=change, a=only: (other is c) == a, lambda node: new[id(node)])  # type: ignore[misc]
    for node in rng.sample(files, min(len(files), wanted // 4)):
        one = new | {id(node): rng.choice([*extremes(node), torn(node, rng)])}
        yield disk.tree(lambda change: False, lambda node, o=one: o[id(node)])  # type: ignore[misc]
    for _ in range(wanted):
        share = rng.choice((0.1, 0.5, 0.9))
        lost = {id(change) for change in changes if rng.random() < share}
        drawn = {id(node): torn(node, rng) if rng.random() < 0.5 else node.content for node in files}
        yield disk.tree(lambda change, x=lost: id(change) in x, lambda node, d=drawn: d[id(node)])  # type: ignore[misc]


def _all(disk: Disk, changes: list[Change], files: list[Node]) -> Iterator[Tree]:
    chosen: dict[int, bytes] = {}

    def over_files(rest: list[Node], lost: set[int]) -> Iterator[Tree]:
        if not rest:
            yield disk.tree(lambda change: id(change) in lost, lambda node: chosen[id(node)])
            return
        for content in extremes(rest[0]):
            chosen[id(rest[0])] = content
            yield from over_files(rest[1:], lost)

    for bits in range(2 ** len(changes)):
        yield from over_files(files, {id(change) for i, change in enumerate(changes) if bits >> i & 1})


class Shelf:
    """Builds states in a folder. Unchanging files with equal content are hard links to one file on the `shelf`."""

    def __init__(self, shelf: Path) -> None:
        self.folder, self._known = shelf, dict[bytes, str]()
        shelf.mkdir(parents=True)

    def build(self, tree: Tree, root: Path, unchanging: Callable[[str], bool]) -> None:
        """Build `tree` in the new folder `root`. No process may write to files with `unchanging` paths."""
        root.mkdir()
        for path, content in tree.items():
            target = root / path
            if content is None:
                target.mkdir()
            elif isinstance(content, Link):
                target.hardlink_to(root / content.path)
            elif unchanging(path):
                target.hardlink_to(self._file(content))
            else:
                target.write_bytes(content)

    def _file(self, content: bytes) -> str:
        if content not in self._known:
            path = self.folder / str(len(self._known))
            path.write_bytes(content)
            self._known[content] = str(path)
        return self._known[content]

    def changed(self) -> list[str]:
        """Return unchanging files that a process has changed."""
        return [path for content, path in self._known.items() if Path(path).read_bytes() != content]
