"""States that a power cut may leave of recorded file operations, by what POSIX promises and no more.

- A file has the bytes of its last fsync. Each block of 4 KiB that was changed since is as it was, as it is now, or,
  where it was cut off or did not exist, zeros; and the file may end anywhere between its least and its greatest length
  since.
- A directory has the names of its last fsync. Of the changes since (a name made, taken away, or given to another in one
  piece by a rename) any may have happened and any other not, in whatever order they were made. A file's own fsync does
  not make its name durable, nor does a directory's that of the directory.

File systems leave less: ext4 (data=ordered, with delayed allocation) and XFS keep changes of names in order, and write
a new size only after the data. What holds for the states here holds for theirs.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from tests.support.recorded_files import Op

BLOCK = 4096
EXHAUSTIVE = 64
"""As many states of one moment are all built; of more, some are drawn."""


@dataclass(eq=False)
class Change:
    """A change of a directory: a name that `node` gets, and one that it loses; of a rename to another directory one for
    each of the two, of an exchange one for each of the nodes, which happen in one piece."""

    node: "Node"
    given: str | None
    taken: str | None
    number: int
    """Of the operation."""
    other: "tuple[Node, Change] | None" = None
    follows: bool = False
    """Whether the other one decides for both."""

    @property
    def decides(self) -> "Change":
        return self.other[1] if self.follows and self.other is not None else self


@dataclass(eq=False)
class Node:
    """A file or a directory: as it is, as it was synced, and what has happened since."""

    is_dir: bool
    number: int = 0
    """Of the operation that made it."""
    content: bytes = b""
    synced: bytes = b""
    lengths: list[int] = field(default_factory=lambda: [0])
    """Of a file since its last sync."""
    names: dict[str, "Node"] = field(default_factory=dict)
    durable: dict[str, "Node"] = field(default_factory=dict)
    pending: list[Change] = field(default_factory=list)

    @property
    def dirty(self) -> bool:
        return self.content != self.synced


Tree = dict[str, "bytes | Link | None"]
"""Each path with the bytes of a file, None for a directory, or the path of a file whose other name it is."""


@dataclass(frozen=True)
class Link:
    """Another name of the file at `path`."""

    path: str


class Disk:
    """The recorded folder, operation by operation.

    `safe` names folders that lie on another machine, whose power does not fail: all that is done there stays done.
    """

    def __init__(self, safe: Sequence[str] = ()) -> None:
        self.root, self._safe, self._number = Node(is_dir=True), tuple(safe), 0

    def apply(self, op: Op) -> None:
        """Do `op`."""
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
        if (node := parent.names.get(name)) is not None:  # else its name was taken away while it was open
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

    def _change(self, parent: Node, node: Node, given: str | None, taken: str | None) -> Change:
        change = Change(node, given, taken, self._number)
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
        """Changes of names that may be lost, and files whose bytes may, as far as anything may lead there."""
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
        """What is there when `lost` changes are, and dirty files have `bytes_of` them."""
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
                    # A directory has one name: of two that a lost change would leave it, the first.
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
    if change.taken is not None and names.get(change.taken) is change.node:
        del names[change.taken]
    if change.given is not None:
        if change.node.is_dir:
            for name in [name for name, node in names.items() if node is change.node]:
                del names[name]
        names[change.given] = change.node


def torn(node: Node, rng: random.Random) -> bytes:
    """The bytes of a dirty file, drawn."""
    low, high = min([len(node.synced), *node.lengths]), max([len(node.synced), *node.lengths])
    cut = min(node.lengths)
    size = rng.choice((low, high, len(node.content), rng.randint(low, high)))
    found = bytearray()
    for start in range(0, size, BLOCK):
        old = node.synced[start : start + BLOCK].ljust(BLOCK, b"\0")
        new = node.content[start : start + BLOCK].ljust(BLOCK, b"\0")
        zero = bytes(BLOCK) if start + BLOCK > min(cut, len(node.synced)) else old
        if zero is not old and start < min(cut, len(node.synced)):
            kept = min(cut, len(node.synced)) - start  # what was there and was never cut off stays
            zero = old[:kept].ljust(BLOCK, b"\0")
        found += rng.choice((old, new, zero))
    return bytes(found[:size])


def extremes(node: Node) -> list[bytes]:
    """The old bytes of a dirty file, the new ones, zeros, and half of the new ones, as far as they differ."""
    zeros = node.synced[: min([*node.lengths, len(node.synced)])].ljust(len(node.content), b"\0")
    half = (len(node.synced) + len(node.content)) // 2
    return list(dict.fromkeys([node.synced, node.content, zeros, node.content[:half]]))


def states(disk: Disk, wanted: int, rng: random.Random) -> Iterator[Tree]:
    """States of this moment: all when they are few, else the extreme ones first and then drawn ones, about `wanted`.

    Some may be equal.
    """
    changes, files = disk.uncertain()
    count = 2 ** len(changes) * 4 ** len(files)
    if count <= EXHAUSTIVE:
        yield from _all(disk, changes, files)
        return
    new = {id(node): node.content for node in files}
    old = {id(node): node.synced for node in files}
    yield disk.tree(lambda change: False, lambda node: new[id(node)])
    yield disk.tree(lambda change: True, lambda node: old[id(node)])
    # Names are there and bytes are not, and the other way round.
    zeros = {id(node): extremes(node)[-2] for node in files}
    yield disk.tree(lambda change: False, lambda node: old[id(node)])
    yield disk.tree(lambda change: False, lambda node: zeros[id(node)])
    yield disk.tree(lambda change: True, lambda node: new[id(node)])
    singles: list[tuple[Change, bool]] = [(change, alone) for change in changes for alone in (True, False)]
    rng.shuffle(singles)
    for change, alone in singles[: wanted // 2]:
        yield disk.tree(lambda other, c=change, a=alone: (other is c) == a, lambda node: new[id(node)])  # type: ignore[misc]
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
    """Builds states in a folder; files of one content are names of one file on the `shelf` where nothing may change
    them."""

    def __init__(self, shelf: Path) -> None:
        self.folder, self._known = shelf, dict[bytes, str]()
        shelf.mkdir(parents=True)

    def build(self, tree: Tree, root: Path, unchanging: Callable[[str], bool]) -> None:
        """Make `tree` in the new folder `root`; files whose path is `unchanging` must not be written to."""
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
        """Files that were written to although they must not be."""
        return [path for content, path in self._known.items() if Path(path).read_bytes() != content]
