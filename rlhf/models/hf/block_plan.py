"""Plan of who writes which block of a file whose bytes lie on many ranks. Imports no torch.

A file is written in blocks of 4 MiB, each by one rank, since a block has one hash. Of a block that several ranks have
parts of, the one with the largest part is the writer, and gets the others' parts sent.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from rlhf.storage.hashing import BLOCK

Extent = tuple[int, int]
"""Bytes [begin, end) of a block."""
HeldBytes = tuple[int, int, int]
"""Bytes [begin, end) of a file, and the rank that has them."""


@dataclass(frozen=True)
class MixedBlock:
    """A block that several ranks have parts of. `others` are the parts that its writer gets from each other rank; empty
    for those who send them."""

    number: int
    writer: int
    others: dict[int, list[Extent]] = field(default_factory=dict)


@dataclass
class BlockPlan:
    """One rank's work on a file: the mixed blocks that it writes or has a part of, in ascending order on every rank, so
    that nobody waits in a circle; and the blocks that it writes from what it has."""

    mixed: list[MixedBlock] = field(default_factory=list)
    own: list[int] = field(default_factory=list)


def plan_blocks(held: Sequence[HeldBytes], size: int, writers: Sequence[int]) -> defaultdict[int, BlockPlan]:
    """The plans of the ranks that take part in writing a file of `size` bytes; only `writers` write.

    Args:
        held: who has which bytes, without overlaps. What nobody has (the header) every writer can make.
    """
    plans: defaultdict[int, BlockPlan] = defaultdict(BlockPlan)
    for number, parts in enumerate(_by_block(held, -(-size // BLOCK))):
        sizes = {rank: sum(end - begin for begin, end in extents) for rank, extents in parts.items()}
        able = [rank for rank in sorted(parts) if rank in writers]
        writer = max(able, key=lambda rank: sizes[rank]) if able else writers[number % len(writers)]
        others = {rank: parts[rank] for rank in sorted(parts) if rank != writer}
        if not others:
            plans[writer].own.append(number)
            continue
        plans[writer].mixed.append(MixedBlock(number, writer, others))
        for rank in others:
            plans[rank].mixed.append(MixedBlock(number, writer))
    return plans


def _by_block(held: Iterable[HeldBytes], count: int) -> Iterator[dict[int, list[Extent]]]:
    """For each block of a file the parts that each rank has, in their order."""
    blocks: list[dict[int, list[Extent]]] = [{} for _ in range(count)]
    for begin, end, rank in sorted(held):
        while begin < end:
            number, offset = divmod(begin, BLOCK)
            length = min(end - begin, BLOCK - offset)
            blocks[number].setdefault(rank, []).append((offset, offset + length))
            begin += length
    yield from blocks
