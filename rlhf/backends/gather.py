"""Whole tensors from the ranges that the ranks hold: many in one collective call, few at a time in memory."""

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf.storage.shards import Shard

BUCKET_BYTES = 8 << 20
"""Tensors are gathered together up to this size, a larger one by itself. Larger buckets are slower on a CPU, whose
caches they leave."""


@torch.no_grad()
def whole_tensors(
    shards: Iterable[tuple[str, Shard]], group: dist.ProcessGroup | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor by name, whole, on the device of its shards, to the bit. Collective: the ranks of `group`, by
    default all, iterate together, to the end.

    What every rank holds whole already is not copied.

    Args:
        shards: of every tensor this rank's range; the same names in the same order on every rank, each tensor covered
            by the ranks of `group`.
    """
    named = list(shards)
    held = _held([shard for _, shard in named], group)
    bucket: list[int] = []
    size = 0
    for i, (_, shard) in enumerate(named):
        whole = math.prod(shard.shape)
        if all(numel == whole for _, numel in held[i]):
            yield from _gathered([named[j] for j in bucket], [held[j] for j in bucket], group)
            bucket, size = [], 0
            yield named[i][0], shard.local.detach().view(shard.shape)
            continue
        if bucket and size + whole * shard.local.element_size() > BUCKET_BYTES:
            yield from _gathered([named[j] for j in bucket], [held[j] for j in bucket], group)
            bucket, size = [], 0
        bucket.append(i)
        size += whole * shard.local.element_size()
    yield from _gathered([named[j] for j in bucket], [held[j] for j in bucket], group)


def _held(shards: Sequence[Shard], group: dist.ProcessGroup | None) -> list[list[tuple[int, int]]]:
    """Of each tensor the range (start, number of elements) that each rank holds."""
    if not shards:
        return []
    own = torch.tensor([(shard.start, shard.local.numel()) for shard in shards], device=shards[0].local.device)
    every = own.new_empty(dist.get_world_size(group), *own.shape)
    dist.all_gather(list(every), own, group=group)
    return [[(start, numel) for start, numel in of_ranks] for of_ranks in every.transpose(0, 1).tolist()]


def _gathered(
    bucket: Sequence[tuple[str, Shard]],
    held: Sequence[Sequence[tuple[int, int]]],
    group: dist.ProcessGroup | None,
) -> Iterator[tuple[str, Tensor]]:
    if not bucket:
        return
    locals_ = [shard.local.detach().reshape(-1) for _, shard in bucket]
    ranks = range(dist.get_world_size(group))
    sizes = [sum(held[i][rank][1] * part.element_size() for i, part in enumerate(locals_)) for rank in ranks]
    # Ranks hold more or less of a bucket; the call wants as many bytes of each.
    sent = torch.empty(max(sizes), dtype=torch.uint8, device=locals_[0].device)
    torch.cat([part.view(torch.uint8) for part in locals_], out=sent[: sizes[dist.get_rank(group)]])
    received = sent.new_empty(len(ranks), len(sent))
    dist.all_gather(list(received), sent, group=group)
    offsets = [0] * len(ranks)
    for i, (name, shard) in enumerate(bucket):
        whole = torch.empty(math.prod(shard.shape), dtype=shard.local.dtype, device=shard.local.device)
        content, width = whole.view(torch.uint8), whole.element_size()
        for rank, (start, numel) in enumerate(held[i]):
            part = received[rank, offsets[rank] : offsets[rank] + numel * width]
            content[start * width : (start + numel) * width].copy_(part)
            offsets[rank] += numel * width
        yield name, whole.view(shard.shape)
