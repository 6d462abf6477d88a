"""Maps weights to Hugging Face tensors; some weights (experts) consist of several tensors there."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from rlhf.storage.boxes import bounds, overlaps, range_box, strides_of
from rlhf.storage.shards import Shard, Shards


@dataclass(frozen=True)
class FilePart:
    """A Hugging Face tensor: elements [start, start + its size) of a flattened weight."""

    name: str
    start: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)


FileParts = Mapping[str, Sequence[FilePart]]
"""Weight's name -> the Hugging Face tensors that cover the weight. A weight without an entry is stored unchanged."""


def parts_of(parts: FileParts, name: str, shape: Sequence[int]) -> Sequence[FilePart]:
    return parts.get(name) or [FilePart(name, 0, tuple(shape))]


def shards_in_files(shards: Shards, parts: FileParts) -> dict[str, Shard]:
    """Return views of `shards` as this rank's shards of the Hugging Face tensors."""
    found = {}
    for name, shard in shards.items():
        row_major = replace(shard, local=shard.local.contiguous())
        for part in parts_of(parts, name, shard.shape):
            found[part.name] = _in_part(row_major, part)
    return found


def _in_part(shard: Shard, part: FilePart) -> Shard:
    """Return the overlap of `shard` and a Hugging Face tensor.

    Each expert, and each row of an expert, is a consecutive range of the fused weight. So the overlap of a box of the
    weight with an expert is a box of the expert.
    """
    common = list(overlaps(shard.box, range_box(part.start, part.stop), shard.shape))
    if not common:
        return Shard(part.shape, (0,), shard.local.reshape(-1)[:0], shard.saved_here)
    [inner] = common
    start = bounds(inner, shard.shape)[0] - part.start
    if inner.is_range:
        return Shard(part.shape, (start,), shard.at(inner), shard.saved_here)
    offsets = tuple(start // stride % size for stride, size in zip(strides_of(part.shape), part.shape, strict=True))
    piece = shard.at(inner).view(inner.sizes[len(inner.sizes) - len(part.shape) :])
    return Shard(part.shape, offsets, piece, shard.saved_here)


def whole_in_files(weights: Iterable[tuple[str, Tensor]], parts: FileParts) -> Iterator[tuple[str, Tensor]]:
    """Yield views of whole `weights` as Hugging Face tensors."""
    for name, weight in weights:
        for part in parts_of(parts, name, weight.shape):
            yield part.name, weight.reshape(-1)[part.start : part.stop].view(part.shape)
