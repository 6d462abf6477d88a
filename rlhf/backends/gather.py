"""All-gathers sharded tensors in buckets: many tensors in one collective call, few at a time in memory."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf.config.buffer_sizes import GATHER_BUCKET
from rlhf.ranks import dims
from rlhf.ranks.collectives import gather_from
from rlhf.storage.boxes import Box, layout_of, whole_box
from rlhf.storage.shards import Shard, Shards, strided_view


class _PartsOfRanks(NamedTuple):
    """Parts of one tensor on all ranks.

    Attributes:
        unsharded: every rank has the whole tensor.
        equal: the parts have equal sizes and, concatenated by rank, form the flattened tensor.
        boxes: the part of each rank; empty if `unsharded` or `equal`.
    """

    unsharded: bool
    equal: bool
    boxes: list[Box]


@torch.no_grad()
def gather_tensors(
    shards: Iterable[tuple[str, Shard]],
    ranks: dims.RankGroup,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor by name, unsharded, bit for bit unless cast.

    Collective: all `ranks` must iterate together to the end. A tensor that is unsharded on every rank is copied only if
    it is cast or moved to another device.

    Args:
        shards: this rank's part of every tensor. Names and order are the same on every rank, and the parts of `ranks`
            cover each tensor.
        ranks: the ranks that shard one copy of the model.
        dtype: type to which floating-point tensors are cast before the gather, the same on every rank; None casts none.
        device: device of the gather; None for the shards' own device.
    """
    named = list(shards)
    parts = _parts_of_ranks([shard for _, shard in named], ranks, device)

    def as_sent(shard: Shard) -> Tensor:
        # Move before the cast: the tensor may be in host memory, and a GPU casts faster.
        return shard.local.detach().to(device).to(cast_type(shard.local, dtype))

    def gathered(bucket: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
        # Copy bucket by bucket, because copies of all tensors at once would need the memory of a second model.
        own = [(named[i][0], named[i][1].shape, as_sent(named[i][1]).reshape(-1)) for i in bucket]
        if bucket and parts[bucket[0]].equal:
            return _gathered_equal(own, ranks)
        return _gathered(own, [parts[i].boxes for i in bucket], ranks)

    bucket: list[int] = []
    size = 0
    for i, (_, shard) in enumerate(named):
        nbytes = math.prod(shard.shape) * cast_type(shard.local, dtype).itemsize
        if parts[i].unsharded:
            yield from gathered(bucket)
            bucket, size = [], 0
            yield named[i][0], as_sent(shard).view(shard.shape)
            continue
        if bucket and (size + nbytes > GATHER_BUCKET or parts[i].equal != parts[bucket[0]].equal):
            yield from gathered(bucket)
            bucket, size = [], 0
        bucket.append(i)
        size += nbytes
    yield from gathered(bucket)


@torch.no_grad()
def split_over_ranks(tensors: Iterable[tuple[str, Tensor]]) -> Shards:
    """Return a copy of this rank's equal part of each flattened tensor, in host memory.

    Collective if the iteration of `tensors` is collective.
    """
    rank, ranks = dims.everyone().rank, dims.everyone().size
    shards: dict[str, Shard] = {}
    for name, tensor in tensors:
        share = math.ceil(tensor.numel() / ranks)
        part = tensor.detach().reshape(-1)[rank * share : (rank + 1) * share]
        start = min(rank * share, tensor.numel())
        shards[name] = Shard(tuple(tensor.shape), (start,), part.to("cpu", copy=True), saved_here=True)
    return shards


def split_bytes(shapes: Iterable[Sequence[int]]) -> int:
    """Return the bytes of the largest part (rank 0's) that `split_over_ranks` makes of float32 tensors of `shapes`."""
    return sum(4 * math.ceil(math.prod(shape) / dims.everyone().size) for shape in shapes)


def cast_type(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return `dtype` if it is not None and `tensor` is floating-point; otherwise the tensor's own type."""
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def _parts_of_ranks(shards: Sequence[Shard], ranks: dims.RankGroup, device: torch.device | None) -> list[_PartsOfRanks]:
    """Return the parts of each tensor. Collective over `ranks`."""
    if not shards:
        return []
    boxes = [shard.box for shard in shards]
    device = device or shards[0].local.device
    ranges = [(box.offsets[0], box.sizes[0]) if box.is_range else (-1, 0) for box in boxes]
    ranges_of_ranks = gather_from(ranks, torch.tensor(ranges, device=device)).cpu()
    # Tensor operations instead of loops over ranks: a large model on many ranks has a million parts.
    starts, sizes = ranges_of_ranks.unbind(-1)  # [ranks, tensors] each
    wholes = torch.tensor([math.prod(shard.shape) for shard in shards])
    unsharded = (sizes == wholes).all(0)
    equal = (sizes * ranks.size == wholes).all(0) & (starts == sizes * torch.arange(ranks.size)[:, None]).all(0)
    boxed = (starts < 0).any(0)
    found = [_PartsOfRanks(*flags, []) for flags in zip(unsharded.tolist(), equal.tolist(), strict=True)]
    for i in (~(unsharded | equal | boxed)).nonzero().flatten().tolist():
        found[i].boxes.extend(Box((start,), (size,)) for start, size in ranges_of_ranks[:, i].tolist())
    # Ranks exchange boxes at every weight sync. Most boxes are ranges, which need two numbers. Other boxes follow here.
    if tensors := boxed.nonzero().flatten().tolist():
        width = max(len(shards[i].shape) for i in tensors)
        rows = torch.tensor([_padded(boxes[i], width) for i in tensors], device=device)
        for i, rank_rows in zip(tensors, gather_from(ranks, rows).transpose(0, 1).tolist(), strict=True):
            found[i].boxes.extend(
                Box(tuple(row[1 : 1 + row[0]]), tuple(row[1 + width : 1 + width + row[0]])) for row in rank_rows
            )
    return found


def _padded(box: Box, width: int) -> list[int]:
    """Return the number of dimensions, the offsets and the sizes as one list, offsets and sizes padded to `width`."""
    rest = [0] * (width - len(box.sizes))
    return [len(box.sizes), *box.offsets, *rest, *box.sizes, *rest]


def _gathered_equal(
    bucket: Sequence[tuple[str, tuple[int, ...], Tensor]], ranks: dims.RankGroup
) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor of a bucket of equal parts, unsharded.

    On any number of ranks, each tensor is copied once after the gather, or not at all if it is alone in its bucket.
    """
    content = [part.view(torch.uint8) for _, _, part in bucket]
    received = gather_from(ranks, content[0] if len(content) == 1 else torch.cat(content))
    widths = [part.numel() for part in content]
    for (name, shape, part), whole in zip(bucket, received.split(widths, dim=1), strict=True):
        yield name, whole.reshape(-1).view(part.dtype).view(shape)


def _gathered(
    bucket: Sequence[tuple[str, tuple[int, ...], Tensor]],
    rank_boxes: Sequence[Sequence[Box]],
    ranks: dims.RankGroup,
) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor of a bucket, unsharded. `bucket` has name, shape and this rank's flattened part."""
    if not bucket:
        return
    parts = [part for _, _, part in bucket]
    sizes = [
        sum(rank_boxes[i][rank].numel * part.element_size() for i, part in enumerate(parts))
        for rank in range(ranks.size)
    ]
    # The collective needs equal sizes, but ranks have different numbers of bytes, so pad to the largest.
    sent = torch.empty(max(sizes), dtype=torch.uint8, device=parts[0].device)
    torch.cat([part.view(torch.uint8) for part in parts], out=sent[: sizes[ranks.rank]])
    received = gather_from(ranks, sent)
    offsets = [0] * ranks.size
    for i, (name, shape, part) in enumerate(bucket):
        whole = torch.empty(math.prod(shape), dtype=part.dtype, device=part.device)
        content, width = whole.view(torch.uint8), whole.element_size()
        for rank, box in enumerate(rank_boxes[i]):
            piece = received[rank, offsets[rank] : offsets[rank] + box.numel * width]
            offsets[rank] += box.numel * width
            if box.is_range:
                content[box.offsets[0] * width :][: len(piece)].copy_(piece)
            else:  # clone, because a view of another type needs aligned memory
                target = strided_view(whole, layout_of(box, whole_box(shape), shape))
                target.copy_(piece.clone().view(part.dtype).view(box.sizes))
        yield name, whole.view(shape)
