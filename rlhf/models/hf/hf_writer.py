"""Writes planned Hugging Face folders: one process from an open checkpoint, or the ranks from live weights.

One process has a few ranges of tensors in memory. A rank has its shards and two blocks of 4 MiB.
"""

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from rlhf.models.adapter_config import PREFIX
from rlhf.models.hf.block_plan import BlockPlan, Extent, MixedBlock, RankBytes, plan_blocks
from rlhf.models.hf.hf_folder import check_range, converted, prefetch_next, ranges_of
from rlhf.models.hf.hf_plan import HfPlan, Progress, in_dtype
from rlhf.models.hf.source import TensorSource
from rlhf.ranks.coordinator import Coordinator
from rlhf.storage.boxes import Strided, bounds, contiguous_runs, layout_of, overlaps, range_box, whole_box
from rlhf.storage.file_parts import FileParts, shards_in_files
from rlhf.storage.files import SharedFile, WrittenFile, write_file
from rlhf.storage.hashing import BLOCK
from rlhf.storage.hf_layout import WeightsFile, with_dtype
from rlhf.storage.safetensors_header import ITEM_BYTES
from rlhf.storage.shard_index import FileShards, parts_of_ranks
from rlhf.storage.shards import DTYPES, Shards, as_bytes, lay_out, strided_view, tensor_table


@dataclass(frozen=True)
class HfExport:
    """This rank's part of a planned folder: its shards of the trained weights, and their `parts` in the files.

    With `is_copy`, the shards are copies for this export, not live state.
    """

    shards: Shards
    parts: FileParts
    plan: HfPlan
    is_copy: bool = False

    @classmethod
    def of(cls, shards: Shards, dtype: str | None, parts: FileParts, files: Mapping[str, bytes]) -> "HfExport":
        """Export `shards` with floating-point weights in `dtype` (`checkpoint.hf_dtype`) and small `files`."""
        tensors = in_dtype(tensor_table(shards_in_files(shards, parts)), dtype)
        return cls(shards, parts, HfPlan(tensors, with_dtype(files, dtype)))

    @classmethod
    def of_adapter(cls, shards: Shards, dtype: str | None, files: Mapping[str, bytes]) -> "HfExport":
        """Export an adapter's `shards`, by their names in a checkpoint, in peft's format."""
        named = {PREFIX + name: shard for name, shard in shards.items()}
        return cls(named, {}, HfPlan.of_adapter(in_dtype(tensor_table(named), dtype), files))

    @cached_property
    def in_files(self) -> Shards:
        """Views of the shards as slices of the tensors in the files."""
        return shards_in_files(self.shards, self.parts)


@dataclass
class ExportedBlocks:
    """Blocks that one rank wrote: hashes by file path and block number, and the seconds per folder."""

    hashes: dict[str, dict[int, str]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Exported:
    """Files that all ranks wrote together, and the seconds of each rank per folder."""

    files: list[WrittenFile]
    seconds: list[dict[str, float]]


def write_hf_folder(
    source: TensorSource, plan: HfPlan, folder: Path, progress: Progress = lambda count: None
) -> list[WrittenFile]:
    """Write a planned folder into the empty `folder`. Hash the written memory, without reading the files back."""
    written = [write_file(folder, file.name, _chunks(source, plan, file, progress)) for file in plan.weights]
    return written + [write_file(folder, name, [content]) for name, content in plan.others().items()]


def _chunks(source: TensorSource, plan: HfPlan, file: WeightsFile, progress: Progress) -> Iterator[bytes | memoryview]:
    yield file.header
    stored = {name: source.contents.tensors[name] for name in file.first_byte}

    def read() -> Iterator[Tensor]:
        for name, start, stop in ranges_of(stored):
            yield converted(name, source.read(name, start, stop), DTYPES[plan.tensors[name][0]])

    for tensor in prefetch_next(read()):
        yield as_bytes(tensor)
        progress(tensor.nbytes)


def write_exports(root: Path, exports: Mapping[str, HfExport], coordinator: Coordinator) -> Exported | None:
    """Write `exports` (folder below `root` -> export) on the leader's disk; fsync every file. Collective.

    Return None on ranks other than the leader, and without exports. Raise on every rank if any rank fails.
    """
    if not exports:
        return None
    shares = coordinator.collect(
        lambda: {folder: lay_out("", export.in_files)[1] for folder, export in exports.items()}
    )
    plans = coordinator.scatter(lambda: _plan(exports, shares or [], coordinator))
    done = coordinator.collect(partial(_write, root, exports, plans, coordinator))
    if done is None:
        return None
    files = []
    for folder, export in exports.items():
        for file in export.plan.weights:
            path = f"{folder}/{file.name}"
            hashes = {number: text for rank in done for number, text in rank.hashes.get(path, {}).items()}
            files.append(WrittenFile(path, file.size, "".join(hashes[number] for number in range(len(hashes)))))
    return Exported(files, [rank.seconds for rank in done])


RankPlan = dict[str, list[BlockPlan]]  # one rank's work: for each folder, a plan per file


def _plan(
    exports: Mapping[str, HfExport], shares: Sequence[Mapping[str, FileShards]], coordinator: Coordinator
) -> list[RankPlan]:
    """Return the plans of all ranks from their shards; ranks in the leader's storage domain write."""
    writers = [rank for rank, domain in enumerate(coordinator.domains) if domain == coordinator.domains[0]]
    plans: list[RankPlan] = [{} for _ in shares]
    for folder, export in exports.items():
        ranges = _bytes_by_file(export, [share[folder] for share in shares])
        for file in export.plan.weights:
            by_rank = plan_blocks(ranges[file.name], file.size, writers)
            for rank, plan in enumerate(plans):
                plan.setdefault(folder, []).append(by_rank[rank])
    return plans


def _bytes_by_file(export: HfExport, shares: Sequence[FileShards]) -> dict[str, list[RankBytes]]:
    places = {name: (file.name, first) for file in export.plan.weights for name, first in file.first_byte.items()}
    found: dict[str, list[RankBytes]] = {file.name: [] for file in export.plan.weights}
    for rank, parts in enumerate(parts_of_ranks(tensor_table(export.in_files), shares)):
        for name, box in parts:
            (file, first), (kind, shape) = places[name], export.plan.tensors[name]
            found[file] += (
                (*extent, rank) for extent in _extents(layout_of(box, whole_box(shape), shape), kind, first)
            )
    return found


def _extents(layout: Strided, kind: str, first: int) -> Iterator[Extent]:
    """Yield the byte runs of the elements of a layout; element 0 is at byte `first`."""
    length, [begins] = contiguous_runs(layout)
    width = ITEM_BYTES[kind]
    for begin in (first + begins * width).tolist():
        yield begin, begin + length * width


def _write(root: Path, exports: Mapping[str, HfExport], plans: RankPlan, coordinator: Coordinator) -> ExportedBlocks:
    """Write and send this rank's blocks. Raise an error only at the end, so that no other rank waits forever."""
    written, work = ExportedBlocks(), _BlockWriter(coordinator)
    for folder, export in exports.items():
        since = time.monotonic()
        for file, plan in zip(export.plan.weights, plans[folder], strict=True):
            written.hashes[f"{folder}/{file.name}"] = work.write(root, folder, _LocalFile(export, file), plan)
        written.seconds[folder] = time.monotonic() - since
    if work.problem is not None:
        raise work.problem
    return written


class _LocalFile:
    """This rank's bytes of one file: the header (on every rank) and its shards."""

    def __init__(self, export: HfExport, file: WeightsFile) -> None:
        self._tensors, self.file = export.plan.tensors, file
        named = ((name, export.in_files[name]) for name in file.first_byte)
        # In file order, as in `plan_blocks`: a message has its parts of a block in this order.
        self._shards = [(name, shard) for name, shard in named if shard.saved_here and shard.local.numel()]
        self._begins = [
            file.first_byte[name] + bounds(shard.box, shard.shape)[0] * ITEM_BYTES[self._tensors[name][0]]
            for name, shard in self._shards
        ]

    def block_bytes(self, number: int) -> int:
        return min(BLOCK, self.file.size - number * BLOCK)

    def extents(self, number: int) -> list[Extent]:
        """Return the byte ranges of a block that this rank's shards cover."""
        parts = self._parts(number)
        return [extent for name, _, begin, place in parts for extent in _extents(place, self._tensors[name][0], begin)]

    def fill(self, number: int, block: Tensor) -> None:
        """Copy the header and this rank's shards, where they overlap a block, into `block`."""
        start = number * BLOCK
        header = self.file.header[start : start + BLOCK]
        if header:
            block[: len(header)].copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        for name, source, begin, place in self._parts(number):
            dtype = DTYPES[self._tensors[name][0]]
            target = strided_view(block[begin : begin + place.span * dtype.itemsize].view(dtype), place)
            target.copy_(source)
            check_range(name, source, target)

    def _parts(self, number: int) -> Iterator[tuple[str, Tensor, int, Strided]]:
        """Yield this rank's elements in a block as (tensor name, elements, byte, layout).

        `byte` is the offset of the first element in the block, and `layout` places the elements from there on.
        """
        start = number * BLOCK
        stop = start + self.block_bytes(number)
        candidate = max(0, bisect_right(self._begins, start) - 1)
        for (name, shard), begin in islice(zip(self._shards, self._begins, strict=True), candidate, None):
            if begin >= stop:
                break
            kind, shape = self._tensors[name]
            width, first, whole = ITEM_BYTES[kind], self.file.first_byte[name], whole_box(shape)
            low, high = max(start - first, 0) // width, min((stop - first) // width, whole.numel)
            for common in overlaps(shard.box, range_box(low, max(low, high)), shape):
                place = layout_of(common, whole, shape)
                yield name, shard.at(common), first + place.offset * width - start, place._replace(offset=0)


class _BlockWriter:
    """Writes one rank's blocks, with memory for two blocks.

    `problem` is the first error. After an error the rank stops writing, but still sends the parts that other ranks wait
    for.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._block, self._message = (torch.empty(BLOCK, dtype=torch.uint8) for _ in range(2))
        self.problem: Exception | None = None

    @torch.no_grad()
    def write(self, root: Path, folder: str, local: _LocalFile, plan: BlockPlan) -> dict[int, str]:
        """Write and send blocks as `plan` lists them; return the hashes of the written blocks."""
        hashes: dict[int, str] = {}
        writes = plan.own or any(mixed.writer == self._coordinator.rank for mixed in plan.mixed)
        with ExitStack() as opened:
            shared: list[SharedFile] = []

            def begin() -> None:
                shared.append(SharedFile(root, f"{folder}/{local.file.name}"))
                opened.callback(shared[0].close)

            def keep(number: int) -> None:
                hashes[number] = shared[0].write(number, as_bytes(self._block[: local.block_bytes(number)]))

            if writes:
                self._try(begin)
            for mixed in plan.mixed:
                if mixed.writer != self._coordinator.rank:
                    self._send(local, mixed)
                    continue
                self._receive(local, mixed)
                self._try(partial(keep, mixed.number))
            for number in plan.own:
                self._try(partial(local.fill, number, self._block))
                self._try(partial(keep, number))
            if writes:
                self._try(lambda: shared[0].sync())
        return hashes

    def _send(self, local: _LocalFile, mixed: MixedBlock) -> None:
        self._try(lambda: local.fill(mixed.number, self._block))
        parts = [self._block[begin:end] for begin, end in local.extents(mixed.number)]
        self._coordinator.send(torch.cat(parts), mixed.writer)

    def _receive(self, local: _LocalFile, mixed: MixedBlock) -> None:
        self._try(lambda: local.fill(mixed.number, self._block))
        for rank, extents in mixed.others.items():
            message = self._message[: sum(end - begin for begin, end in extents)]
            self._coordinator.receive(message, rank)
            for begin, end in extents:
                self._block[begin:end].copy_(message[: end - begin])
                message = message[end - begin :]

    def _try(self, action: Callable[[], object]) -> None:
        if self.problem is None:
            try:
                action()
            except Exception as error:
                self.problem = error
