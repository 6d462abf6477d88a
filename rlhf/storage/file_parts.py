"""Weights under the names of Hugging Face files, some of which have one weight in several tensors (experts)."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from rlhf.storage.shards import Shard, Shards


@dataclass(frozen=True)
class FilePart:
    """Tensor of the files as elements [start, start + its size) of a flattened weight."""

    name: str
    start: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        """The element after its last one."""
        return self.start + math.prod(self.shape)


FileParts = Mapping[str, Sequence[FilePart]]
"""Name of a weight -> what the files have of it, which covers it; a weight without an entry is there as it is."""


def parts_of(parts: FileParts, name: str, shape: Sequence[int]) -> Sequence[FilePart]:
    """Tensors of the files that make up one weight."""
    return parts.get(name) or [FilePart(name, 0, tuple(shape))]


def shards_in_files(shards: Shards, parts: FileParts) -> dict[str, Shard]:
    """Views of `shards` as this rank's shards of the tensors of the files."""
    found = {}
    for name, shard in shards.items():
        local, end = shard.local.reshape(-1), shard.start + shard.local.numel()
        for part in parts_of(parts, name, shard.shape):
            low, high = (min(max(at, part.start), part.stop) for at in (shard.start, end))
            piece = local[low - shard.start : high - shard.start] if low < high else local[:0]
            found[part.name] = Shard(part.shape, low - part.start, piece, shard.owner)
    return found


def whole_in_files(weights: Iterable[tuple[str, Tensor]], parts: FileParts) -> Iterator[tuple[str, Tensor]]:
    """Views of whole `weights` as the tensors of the files."""
    for name, weight in weights:
        for part in parts_of(parts, name, weight.shape):
            yield part.name, weight.reshape(-1)[part.start : part.stop].view(part.shape)
