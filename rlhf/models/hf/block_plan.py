"""Assigns each block of a file, whose bytes are on many ranks, to the rank that writes the block. Imports no torch.

Each block of 4 MiB has one hash, so one rank writes it: the writer with the largest part, or any writer if none has a
part. The other ranks send their parts.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from rlhf.storage.hashing import BLOCK

Extent = tuple[int, int]  # byte range [begin, end) of a block
RankBytes = tuple[int, int, int]  # byte range [begin, end) of a file, and the rank that has the bytes


@dataclass(frozen=True)
class MixedBlock:
    """A block with parts on several ranks.

    `others` lists the parts that the writer receives, by rank. It is empty in the plans of ranks that send.
    """

    number: int
    writer: int
    others: dict[int, list[Extent]] = field(default_factory=dict)


@dataclass
class BlockPlan:
    """One rank's blocks of a file.

    The rank writes `own` blocks without communication. It writes `mixed` blocks or sends a part of them, in ascending
    order on every rank: another order could deadlock.
    """

    mixed: list[MixedBlock] = field(default_factory=list)
    own: list[int] = field(default_factory=list)


def plan_blocks(ranges: Sequence[RankBytes], size: int, writers: Sequence[int]) -> defaultdict[int, BlockPlan]:
    """Return the plan of each rank that has bytes of a file of `size` bytes, or writes blocks of it.

    Only `writers` write. `ranges` do not overlap. Every writer has the bytes outside `ranges` (the header).
    """
    plans: defaultdict[int, BlockPlan] = defaultdict(BlockPlan)
    for number, parts in enumerate(_by_block(ranges, -(-size // BLOCK))):
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


def _by_block(ranges: Iterable[RankBytes], count: int) -> Iterator[dict[int, list[Extent]]]:
    """Yield, for each block, the parts of each rank in ascending order."""
    blocks: list[dict[int, list[Extent]]] = [{} for _ in range(count)]
    for begin, end, rank in sorted(ranges):
        while begin < end:
            number, offset = divmod(begin, BLOCK)
            length = min(end - begin, BLOCK - offset)
            blocks[number].setdefault(rank, []).append((offset, offset + length))
            begin += length
    yield from blocks
