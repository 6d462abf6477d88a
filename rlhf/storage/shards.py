"""Saves and loads tensors as shards, each a box of a tensor or a range of its flattened elements.

FSDP2's rows, cuts by columns, ZeRO's flat partitions and unsharded tensors are all such parts (`boxes`). So each
backend loads the checkpoints of all backends, on any number of ranks. Each rank writes its shards as 1-D tensors into
one safetensors file. An index beside the files maps parts to bytes.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf.storage.boxes import Box, Strided, halves, layout_of, normalize, range_box, whole_box
from rlhf.storage.files import WrittenFile, write_file
from rlhf.storage.hashing import BLOCK
from rlhf.storage.index_rows import Tensors, rows_of
from rlhf.storage.reading import CheckedFiles
from rlhf.storage.safetensors_header import FLOATS, TORCH_NAMES, make_safetensors_header
from rlhf.storage.shard_index import FileShards, Piece, ShardIndex, hash_of_table
from rlhf.storage.whole_tensors import WholeTensors

# Bytes of the page-locked buffer through which tensors are copied to a GPU.
LANDING_BYTES = 16 * BLOCK
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, of_torch) for name, of_torch in TORCH_NAMES.items()}
"""safetensors' name of a type -> torch's type."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Shard:
    """One rank's part of a named tensor of `shape`.

    With one offset per dimension the part is a box, which begins at `offsets` and has the sizes of `local`. With a
    single offset it is the range [offset, offset + local.numel()) of the flattened tensor, and `local` has any shape.
    `local` is row-major. `saved_here` is whether this rank saves the part; one rank saves a replicated part. A load
    fills `local` on every rank.
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    local: Tensor
    saved_here: bool = True

    @property
    def box(self) -> Box:
        """The part of the tensor; a range of the flattened tensor if the part is contiguous there."""
        if len(self.offsets) == len(self.shape) != 1:
            return normalize(Box(self.offsets, tuple(self.local.shape)), self.shape)
        return range_box(self.offsets[0], self.offsets[0] + self.local.numel())

    def cut(self, whole: Tensor) -> Tensor:
        """Return this part of a whole tensor of `shape`, in the shape of `local`."""
        layout = layout_of(self.box, whole_box(self.shape), self.shape)
        return strided_view(whole.reshape(-1), layout).reshape(self.local.shape)

    def at(self, inner: Box) -> Tensor:
        """Return a view of `local` with the sizes of `inner`, a part of this shard's box from `boxes.overlaps`."""
        own = self.box
        if own.is_range:
            return strided_view(self.local.detach().view(-1), layout_of(inner, own, self.shape))
        begins = [a - b for a, b in zip(inner.offsets, own.offsets, strict=True)]
        return self.local.detach()[tuple(slice(a, a + n) for a, n in zip(begins, inner.sizes, strict=True))]


def strided_view(elements: Tensor, layout: Strided) -> Tensor:
    """Return the view `layout` of 1-D `elements`."""
    return elements.as_strided(layout.sizes, layout.strides, elements.storage_offset() + layout.offset)


Shards = Mapping[str, Shard]
"""Tensor name -> this rank's shard."""


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor as bytes. Writing to the view writes to the tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def safetensors_chunks(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file: the header, then each tensor. Contiguous CPU tensors are not copied."""
    yield _header(tensors, metadata)
    for tensor in tensors.values():
        if tensor.numel():
            yield as_bytes(tensor.cpu().contiguous())


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    table = {name: (DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}
    return make_safetensors_header(table, metadata)


def tensor_table(shards: Shards) -> Tensors:
    """Return the types and shapes of all tensors, by name: the same on every rank."""
    return {name: (DTYPE_NAMES[shard.local.dtype], tuple(shard.shape)) for name, shard in shards.items()}


def lay_out(file_name: str, shards: Shards) -> tuple[dict[str, Tensor], FileShards]:
    """Return the shards that this rank saves, flattened and in the order of its file, and its share of the index. The
    share has a hash of all tensors, saved here or not, so that the merge notices a tensor that no rank saves."""
    flat = {name: p.local.detach().reshape(-1) for name, p in shards.items() if p.saved_here and p.local.numel()}
    # One rank writes the optimizer's step counts and all ranks read the counts. Store the counts next to each other:
    # otherwise all ranks would read that rank's whole file.
    flat = dict(sorted(flat.items(), key=lambda item: item[1].numel() > 1))
    number = {name: i for i, name in enumerate(sorted(shards))}
    rows = rows_of((number[name], shards[name].box) for name in flat)
    return flat, FileShards(file_name, len(_header(flat)), rows, hash_of_table(tensor_table(shards)))


def write_shards(root: Path, folder: str, file_name: str, shards: Shards) -> tuple[list[WrittenFile], FileShards]:
    """Write the shards that this rank saves to `folder/file_name`. Return the file, if any, and the index share."""
    flat, share = lay_out(file_name, shards)
    if not flat:
        return [], share
    return [write_file(root, f"{folder}/{file_name}", safetensors_chunks(flat))], share


class TensorReader:
    """Reads parts of the tensors in one folder of a checkpoint, written by any backend on any number of ranks. `rank`
    and `world_size` only help to guess the files that contain this rank's parts. Every rank may read all parts."""

    def __init__(
        self, files: CheckedFiles, folder: str, index: ShardIndex | WholeTensors, rank: int = 0, world_size: int = 1
    ) -> None:
        self._files, self._folder, self._index = files, folder, index
        self._rank, self._world_size = rank, world_size

    @classmethod
    def of_component(cls, files: CheckedFiles, folder: str, rank: int = 0, world_size: int = 1) -> "TensorReader":
        return cls(files, folder, ShardIndex(files, folder), rank, world_size)

    @classmethod
    def of_whole_tensors(cls, files: CheckedFiles, folder: str, file_names: Iterable[str]) -> "TensorReader":
        """Return a reader of plain safetensors files in `folder`, such as a Hugging Face folder's."""
        return cls(files, folder, WholeTensors(files, folder, file_names))

    @property
    def tensors(self) -> Tensors:
        return self._index.tensors

    def converted_dtypes(self, shards: Shards) -> dict[str, str]:
        """Return the tensors stored in another floating-point type than in `shards`, with the stored type. Only weights
        of Hugging Face folders may differ; for a native component the result is empty."""
        if not isinstance(self._index, WholeTensors):
            return {}
        stored, wanted = self.tensors, tensor_table(shards)
        both = ((name, stored[name][0], wanted[name][0]) for name in stored.keys() & wanted.keys())
        return {name: dtype for name, dtype, other in both if dtype != other and {dtype, other} <= FLOATS}

    def mismatches(self, shards: Shards) -> list[str]:
        """Return differences from the names, shapes and types of `shards`, a line each. Dtypes that a load converts
        (`converted_dtypes`) are not differences."""
        stored, wanted = dict(self.tensors), tensor_table(shards)
        stored |= {name: (wanted[name][0], stored[name][1]) for name in self.converted_dtypes(shards)}
        lines = [f"{name} is not in the checkpoint" for name in wanted.keys() - stored.keys()]
        lines += [f"{name} is only in the checkpoint" for name in stored.keys() - wanted.keys()]
        both = stored.keys() & wanted.keys()
        lines += [
            f"{name} is {stored[name]} in the checkpoint, {wanted[name]} here"
            for name in both
            if stored[name] != wanted[name]
        ]
        return sorted(lines)

    def blocks(self, shards: Shards) -> dict[str, set[int]]:
        """Return the blocks that `read_into` reads, by path in the checkpoint. Call `mismatches` first."""
        flat = {name: shard.local.detach().reshape(-1) for name, shard in shards.items()}
        return {
            file_name: {block for read in reads for block in range(read.start // BLOCK, -(-read.stop // BLOCK))}
            for file_name, reads in self._locate(shards, flat).items()
        }

    @torch.no_grad()
    # Promise 15.
    def read_into(self, shards: Shards) -> None:
        """Fill every shard's `local` with its part of the stored tensor. Call `mismatches` first. Tensors that
        `converted_dtypes` returns are read and converted one at a time."""
        rounded = self.converted_dtypes(shards)
        for name, dtype in rounded.items():
            stored = torch.empty(shards[name].local.shape, dtype=DTYPES[dtype])
            self.read_into({name: replace(shards[name], local=stored)})
            shards[name].local.copy_(stored)
        shards = {name: shard for name, shard in shards.items() if name not in rounded}
        flat = {name: shard.local.detach().reshape(-1) for name, shard in shards.items()}
        for file_name, reads in self._locate(shards, flat).items():
            self._read(file_name, reads)
        for name, shard in shards.items():
            if flat[name].data_ptr() != shard.local.data_ptr():  # not contiguous: the view is a copy
                shard.local.copy_(flat[name].view(shard.local.shape))

    def _locate(self, shards: Shards, flat: Mapping[str, Tensor]) -> dict[str, list["_Read"]]:
        """Return the reads of each file into `flat`, the flattened `local` of each shard."""
        wanted = {name: box for name, shard in shards.items() if (box := shard.box).numel}
        found: dict[str, list[_Read]] = {}
        for piece in self._index.find(wanted, self._rank, self._world_size):
            shape = self.tensors[piece.name][1]
            reads = _reads(piece, wanted[piece.name], flat[piece.name], shape)
            found.setdefault(f"{self._folder}/{piece.file}", []).extend(reads)
        return found

    def _read(self, name: str, reads: list["_Read"]) -> None:
        direct = [(read.start, read.into.view(torch.uint8)) for read in reads if read.layout is None]
        self._files.read(name, [(start, as_bytes(part)) for start, part in direct if part.device.type == "cpu"])
        elsewhere = [(start, part) for start, part in direct if part.device.type != "cpu"]
        if elsewhere:
            landing = torch.empty(LANDING_BYTES, dtype=torch.uint8, pin_memory=elsewhere[0][1].device.type == "cuda")
            read_via_buffer(landing, self._files, name, elsewhere)
        for batch in _batches([read for read in reads if read.layout is not None]):
            memory = [torch.empty(read.stop - read.start, dtype=torch.uint8) for read in batch]
            self._files.read(name, [(read.start, as_bytes(part)) for read, part in zip(batch, memory, strict=True)])
            for read, part in zip(batch, memory, strict=True):
                assert read.layout is not None
                read.into.copy_(strided_view(part.view(read.into.dtype), read.layout))


class _Read(NamedTuple):
    """A read of the bytes [start, stop) of a file. `into` receives all elements, or only those of `layout`."""

    start: int
    stop: int
    into: Tensor
    layout: Strided | None = None


def _reads(piece: Piece, wanted: Box, elements: Tensor, shape: Sequence[int]) -> Iterator[_Read]:
    """Yield the reads of a piece into `elements`, the flattened memory of the part `wanted`. A read with gaps goes
    through memory of at most LANDING_BYTES. A contiguous read goes to `elements` directly."""
    source, target = (layout_of(piece.box, part, shape) for part in (piece.shard, wanted))
    width = elements.element_size()
    start, length = piece.position + source.offset * width, source.span * width
    if source.contiguous and target.contiguous:
        into = elements[target.offset : target.offset + math.prod(target.sizes)]
        yield _Read(start, start + length, into)
    elif length > LANDING_BYTES:
        for half in halves(piece.box):
            yield from _reads(piece._replace(box=half), wanted, elements, shape)
    else:
        layout = source._replace(offset=0)
        yield _Read(start, start + length, strided_view(elements, target), layout)


def _batches(reads: list[_Read]) -> Iterator[list[_Read]]:
    """Yield `reads` in batches of at most LANDING_BYTES. A block of a file is read once for all reads of a batch."""
    batch: list[_Read] = []
    size = 0
    for read in reads:
        if batch and size + read.stop - read.start > LANDING_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(read)
        size += read.stop - read.start
    if batch:
        yield batch


def read_via_buffer(landing: Tensor, files: CheckedFiles, name: str, wanted: list[tuple[int, Tensor]]) -> None:
    """Fill tensors with bytes of a file, one window of the file at a time, through the CPU tensor `landing`.

    Args:
        landing: uint8 memory of a window. Its size is a multiple of BLOCK, so that no block is read twice.
        name: path of the file in the checkpoint.
        wanted: pairs of a byte position in the file and the uint8 tensor to fill.
    """
    windows: dict[int, list[tuple[int, Tensor]]] = {}
    for start, part in wanted:
        while part.numel():
            offset = start % len(landing)
            length = min(len(landing) - offset, part.numel())
            windows.setdefault(start // len(landing), []).append((offset, part[:length]))
            start, part = start + length, part[length:]
    for number, parts in windows.items():
        copies = [(offset, landing[offset : offset + part.numel()], part) for offset, part in parts]
        files.read(name, [(number * len(landing) + offset, as_bytes(source)) for offset, source, _ in copies])
        for _, source, part in copies:
            part.copy_(source)
