"""Whole tensors out of the ranges of them that the ranks hold: many in one collective call, few at a time in memory."""

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf.checkpoint.tensors import Piece

BUCKET_BYTES = 8 << 20
"""Tensors are gathered together up to this size, a larger one by itself. Larger buckets are slower on a CPU, whose caches they leave."""


@torch.no_grad()
def whole_tensors(pieces: Iterable[tuple[str, Piece]]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor by name, whole, on the device of its pieces, to the bit. Collective: all ranks iterate together, to the end.

    What every rank holds whole already is not copied.

    Args:
        pieces: of every tensor this rank's range; the same names in the same order on every rank, each tensor covered by the ranks.
    """
    named = list(pieces)
    held = _held([piece for _, piece in named])
    bucket: list[int] = []
    size = 0
    for i, (_, piece) in enumerate(named):
        whole = math.prod(piece.shape)
        if all(numel == whole for _, numel in held[i]):
            yield from _gathered([named[j] for j in bucket], [held[j] for j in bucket])
            bucket, size = [], 0
            yield named[i][0], piece.local.detach().view(piece.shape)
            continue
        if bucket and size + whole * piece.local.element_size() > BUCKET_BYTES:
            yield from _gathered([named[j] for j in bucket], [held[j] for j in bucket])
            bucket, size = [], 0
        bucket.append(i)
        size += whole * piece.local.element_size()
    yield from _gathered([named[j] for j in bucket], [held[j] for j in bucket])


def _held(pieces: Sequence[Piece]) -> list[list[tuple[int, int]]]:
    """Of each tensor the range (start, number of elements) that each rank holds."""
    if not pieces:
        return []
    own = torch.tensor([(piece.start, piece.local.numel()) for piece in pieces], device=pieces[0].local.device)
    every = own.new_empty(dist.get_world_size(), *own.shape)
    dist.all_gather(list(every), own)
    return [[(start, numel) for start, numel in of_ranks] for of_ranks in every.transpose(0, 1).tolist()]


def _gathered(
    bucket: Sequence[tuple[str, Piece]], held: Sequence[Sequence[tuple[int, int]]]
) -> Iterator[tuple[str, Tensor]]:
    if not bucket:
        return
    locals_ = [piece.local.detach().reshape(-1) for _, piece in bucket]
    ranks = range(dist.get_world_size())
    sizes = [sum(held[i][rank][1] * part.element_size() for i, part in enumerate(locals_)) for rank in ranks]
    # Ranks hold more or less of a bucket; the call wants as many bytes of each.
    sent = torch.empty(max(sizes), dtype=torch.uint8, device=locals_[0].device)
    torch.cat([part.view(torch.uint8) for part in locals_], out=sent[: sizes[dist.get_rank()]])
    received = sent.new_empty(len(ranks), len(sent))
    dist.all_gather(list(received), sent)
    offsets = [0] * len(ranks)
    for i, (name, piece) in enumerate(bucket):
        whole = torch.empty(math.prod(piece.shape), dtype=piece.local.dtype, device=piece.local.device)
        content, width = whole.view(torch.uint8), whole.element_size()
        for rank, (start, numel) in enumerate(held[i]):
            part = received[rank, offsets[rank] : offsets[rank] + numel * width]
            content[start * width : (start + numel) * width].copy_(part)
            offsets[rank] += numel * width
        yield name, whole.view(piece.shape)
