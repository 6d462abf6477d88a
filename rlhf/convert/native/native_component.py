"""Writes a component of a native checkpoint (weights, moments) as one rank's shards, from any source."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rlhf.models.hf.hf_folder import prefetch_next, ranges_of
from rlhf.models.hf.source import TensorInfo, TensorSource
from rlhf.storage.boxes import whole_box
from rlhf.storage.files import WrittenFile, write_file
from rlhf.storage.index_rows import rows_of
from rlhf.storage.layout import INDEX, rank_file
from rlhf.storage.safetensors_header import make_safetensors_header
from rlhf.storage.shard_index import FileShards, hash_of_table, merge_shares
from rlhf.storage.shards import DTYPE_NAMES, as_bytes


@dataclass(frozen=True)
class Part:
    """A tensor of a component: name, shape and dtype in it, and `read(start, stop)` for a range of elements."""

    name: str
    info: TensorInfo
    read: Callable[[int, int], Tensor]

    def chunks(self) -> Iterator[Tensor]:
        """Yield the elements in order, in the dtype of `info`, a range at a time."""
        for _, start, stop in ranges_of({self.name: self.info}):
            yield self.read(start, stop).to(self.info.dtype)


def part_of(source: TensorSource, source_name: str, name: str, info: TensorInfo) -> Part:
    return Part(name, info, lambda start, stop: source.read(source_name, start, stop))


def zeros(name: str, info: TensorInfo) -> Part:
    return Part(name, info, lambda start, stop: torch.zeros(stop - start))


def write_component(
    root: Path, folder: str, parts: Sequence[Part], progress: Callable[[int], None]
) -> list[WrittenFile]:
    """Write `parts` to `root/folder`, in one file with its index; `progress` gets the bytes as they are written.

    Any number of ranks can load this one file, because each rank reads only its parts: see `rlhf.storage.shards`.
    """
    table = {part.name: (DTYPE_NAMES[part.info.dtype], part.info.shape) for part in parts}
    number = {name: i for i, name in enumerate(sorted(table))}
    # Step counts first, as in a save.
    flat = sorted((part for part in parts if part.info.numel), key=lambda part: part.info.numel > 1)
    header = make_safetensors_header({part.name: (table[part.name][0], (part.info.numel,)) for part in flat})

    def content() -> Iterator[bytes | memoryview]:
        yield header
        for chunk in prefetch_next(chunk for part in flat for chunk in part.chunks()):
            yield as_bytes(chunk)
            progress(chunk.nbytes)

    rows = rows_of((number[part.name], whole_box(part.info.shape)) for part in flat)
    index = merge_shares(table, [FileShards(rank_file(0), len(header), rows, hash_of_table(table))])
    return [write_file(root, f"{folder}/{rank_file(0)}", content()), write_file(root, f"{folder}/{INDEX}", [index])]
