"""Copies each node's files of a snapshot to other nodes before the snapshot is published.

The nodes form a ring. A node's files are copied to the next nodes of the ring; all nodes send at the same time. Each
rank of a node sends and receives a part of the blocks. No rank calls fsync, because the copies are in memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rlhf.checkpoint.commit.manifest import DOMAINS
from rlhf.checkpoint.load.block_messages import BlockMessage
from rlhf.checkpoint.save.pending import Entries
from rlhf.events import announce
from rlhf.ranks.coordinator import Coordinator
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.files import write_range
from rlhf.storage.hashing import BLOCK
from rlhf.storage.reading import CheckedFiles


def with_copies(files: Entries, nodes: Sequence[int], copies: int) -> Entries:
    """Return the manifest's entries after the copy: each file is also on the next `copies` nodes of the ring.
    A file that is already on more than `copies` nodes gets no further copy."""
    result: Entries = {}
    for name, entry in files.items():
        holders = holders_of(entry, nodes)
        if len(holders) <= copies:
            holders = sorted({*holders, *_ring_from(holders[0], nodes)[1 : 1 + copies]})
        result[name] = {key: value for key, value in entry.items() if key != DOMAINS} | (
            {DOMAINS: holders} if len(holders) < len(nodes) else {}
        )
    return result


def holders_of(entry: Mapping[str, Any], nodes: Sequence[int]) -> list[int]:
    """Return the nodes that have the file of `entry`: all `nodes` unless the entry lists them."""
    return list(entry.get(DOMAINS, nodes))


def _ring_from(node: int, nodes: Sequence[int]) -> list[int]:
    first = list(nodes).index(node)
    return [*nodes[first:], *nodes[:first]]


def copied_to(node: int, nodes: Sequence[int], copies: int) -> list[int]:
    """Return the nodes whose memory gets copies of the files of `node`."""
    return _ring_from(node, nodes)[1 : 1 + copies]


@dataclass(frozen=True)
class CopyRoute:
    """The blocks (file, block number) that a rank sends to the rank `peer`, or receives from `peer`."""

    peer: int
    blocks: list[tuple[str, int]]


def route(files: Entries, copies: int, sender: int, receiver: int, domains: Sequence[int], rank: int) -> CopyRoute:
    """Return the blocks that `rank` sends or receives when the node `sender` copies to the node `receiver`.

    `domains` has each rank's node. If the nodes have different numbers of ranks, ranks without a partner have no
    blocks.
    """
    nodes = sorted(set(domains))
    after = with_copies(files, nodes, copies)
    senders, receivers = ([r for r, node in enumerate(domains) if node == each] for each in (sender, receiver))
    pairs = list(zip(senders, receivers, strict=False))
    lane = next((number for number, pair in enumerate(pairs) if rank in pair), None)
    if lane is None:
        return CopyRoute(rank, [])
    names = [
        name
        for name in sorted(files)
        if holders_of(files[name], nodes)[0] == sender
        and receiver not in holders_of(files[name], nodes)
        and receiver in holders_of(after[name], nodes)
    ]
    checked = CheckedFiles(Path(), files)
    blocks = [(name, number) for name in names for number in checked.blocks(name)]
    peer = pairs[lane][1] if rank == pairs[lane][0] else pairs[lane][0]
    return CopyRoute(peer, blocks[lane :: len(pairs)])


def copy_to_nodes(root: Path, files: Entries, copies: int, coordinator: Coordinator) -> None:
    """Copy each file of the unpublished snapshot at `root` to the nodes that `with_copies` lists. Collective.

    The receiver compares each block with its hash. Raises DamagedCheckpoint or OSError on every rank if a block cannot
    be read, differs from its hash, or does not fit into a node's memory.
    """
    announce("memory.copy")
    coordinator.collect(lambda: _copy_own(root, files, copies, coordinator))


def _copy_own(root: Path, files: Entries, copies: int, coordinator: Coordinator) -> None:
    """Send and receive this rank's blocks. Every rank continues after an error, so that no rank waits forever."""
    checked, nodes, here = CheckedFiles(root, files), coordinator.domain_leaders, coordinator.domain
    outgoing, incoming = BlockMessage(), BlockMessage()
    problem: Exception | None = None
    for distance in range(1, 1 + copies):
        after, before = _ring_from(here, nodes)[distance], _ring_from(here, nodes)[-distance]
        to = route(files, copies, here, after, coordinator.domains, coordinator.rank)
        source = route(files, copies, before, here, coordinator.domains, coordinator.rank)
        for sent, expected in zip_longest(to.blocks, source.blocks):
            if sent:
                problem = outgoing.load(checked, *sent) or problem
            if expected:
                incoming.resize(checked, *expected)
            if sent and expected:
                coordinator.exchange(outgoing.tensor, to.peer, incoming.tensor, source.peer)
            elif sent:
                coordinator.send(outgoing.tensor, to.peer)
            else:
                coordinator.receive(incoming.tensor, source.peer)
            if expected and incoming.has_block and problem is None:
                problem = _store(root, checked, incoming, *expected)
    if problem is not None:
        raise problem


def _store(root: Path, files: CheckedFiles, message: BlockMessage, name: str, number: int) -> Exception | None:
    """Verify and write a received block; return the error if this fails."""
    try:
        files.compare_block(name, number, [message.content])
        write_range(root / name, files.size(name), number * BLOCK, message.content)
    except (DamagedCheckpoint, OSError) as error:
        return error
    return None
