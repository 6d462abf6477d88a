"""Tensors on disk as shards: a name, a global shape, and ranges of the flattened (row-major) tensor.

FSDP2's rows, ZeRO's flat partitions and an unsharded tensor are all such ranges, so what one backend wrote at one world
size any other reads at any other. Shards lie in safetensors files, one per rank, as 1-D tensors; an index beside them
says which range is where, down to the byte of the file.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from rlhf.storage.files import WrittenFile, write_file
from rlhf.storage.hashing import BLOCK
from rlhf.storage.reading import CheckedFiles
from rlhf.storage.safetensors_header import make_safetensors_header
from rlhf.storage.shard_index import FLOATS, TORCH_NAMES, FileShards, ShardIndex, Tensors, hash_of_table, rows_of
from rlhf.storage.whole_tensors import WholeTensors

# Page-locked memory through which tensors reach another device.
LANDING_BYTES = 16 * BLOCK
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, of_torch) for name, of_torch in TORCH_NAMES.items()}
"""Types by the names of the safetensors specification."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Shard:
    """One rank's range of a named tensor.

    `local` is contiguous and holds elements [start, start + local.numel()) of the flattened tensor of `shape`. `owner`
    says whether this rank saves it (a replicated tensor has one owner); every rank loads what its `local` covers.
    """

    shape: tuple[int, ...]
    start: int
    local: Tensor
    owner: bool = True


Shards = Mapping[str, Shard]
"""Tensor name -> this rank's shard."""


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor; writing to the view writes to the tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def safetensors_chunks(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file, tensor by tensor, without a copy of CPU tensors: ready to be hashed and
    written."""
    yield _header(tensors, metadata)
    for tensor in tensors.values():
        if tensor.numel():
            yield as_bytes(tensor.cpu().contiguous())


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """What a safetensors file begins with; the tensors follow in their order."""
    table = {name: (DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}
    return make_safetensors_header(table, metadata)


def tensor_table(shards: Shards) -> Tensors:
    """Types and shapes of all tensors, which the ranks have in common."""
    return {name: (DTYPE_NAMES[shard.local.dtype], tuple(shard.shape)) for name, shard in shards.items()}


def lay_out(file_name: str, shards: Shards) -> tuple[dict[str, Tensor], FileShards]:
    """The shards that this rank owns, flattened, in the order in which they lie in its file, and its share of the
    index.

    The share has a hash of every tensor's name, owned or not, so that the merge sees a tensor that no rank owns.
    """
    flat = {name: p.local.detach().reshape(-1) for name, p in shards.items() if p.owner and p.local.numel()}
    # Step counts, which one rank writes and all read, next to each other: scattered, they would make all ranks read all
    # of its file.
    flat = dict(sorted(flat.items(), key=lambda item: item[1].numel() > 1))
    number = {name: i for i, name in enumerate(sorted(shards))}
    starts = ((name, shards[name].start, tensor.numel()) for name, tensor in flat.items())
    rows = rows_of((number[name], start, start + length) for name, start, length in starts)
    return flat, FileShards(file_name, len(_header(flat)), rows, hash_of_table(tensor_table(shards)))


def write_shards(root: Path, folder: str, file_name: str, shards: Shards) -> tuple[list[WrittenFile], FileShards]:
    """Write the shards that this rank owns to `folder/file_name`; returns the file and this rank's share of the
    index."""
    flat, share = lay_out(file_name, shards)
    if not flat:
        return [], share
    return [write_file(root, f"{folder}/{file_name}", safetensors_chunks(flat))], share


class TensorReader:
    """Reads ranges of the tensors in one folder of a checkpoint, whatever world size or backend wrote them.

    `rank` and `world_size` say where a rank's own shards probably are; every rank may read all.
    """

    def __init__(
        self, files: CheckedFiles, folder: str, index: ShardIndex | WholeTensors, rank: int = 0, world_size: int = 1
    ) -> None:
        self._files, self._folder, self._index = files, folder, index
        self._rank, self._world_size = rank, world_size

    @classmethod
    def of_component(cls, files: CheckedFiles, folder: str, rank: int = 0, world_size: int = 1) -> "TensorReader":
        """A reader of what `write_shards` wrote."""
        return cls(files, folder, ShardIndex(files, folder), rank, world_size)

    @classmethod
    def of_whole_tensors(cls, files: CheckedFiles, folder: str, file_names: Iterable[str]) -> "TensorReader":
        """A reader of plain safetensors files of `folder`, such as a Hugging Face folder's."""
        return cls(files, folder, WholeTensors(files, folder, file_names))

    @property
    def tensors(self) -> Tensors:
        """Types and shapes of what is there."""
        return self._index.tensors

    def rounded(self, shards: Shards) -> dict[str, str]:
        """The weights of a Hugging Face folder that are stored in another floating-point type than `shards` have, with
        that type."""
        if not isinstance(self._index, WholeTensors):
            return {}
        stored, wanted = self.tensors, tensor_table(shards)
        both = ((name, stored[name][0], wanted[name][0]) for name in stored.keys() & wanted.keys())
        return {name: dtype for name, dtype, other in both if dtype != other and {dtype, other} <= FLOATS}

    def mismatches(self, shards: Shards) -> list[str]:
        """Differences of the stored names, shapes and types from those of `shards`; none when they are the same
        architecture. Weights that are `rounded` are the same."""
        stored, wanted = dict(self.tensors), tensor_table(shards)
        stored |= {name: (wanted[name][0], stored[name][1]) for name in self.rounded(shards)}
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
        """The blocks of each file that `read_into` reads, by path in the checkpoint. Call `mismatches` first."""
        flat = {name: shard.local.detach().reshape(-1) for name, shard in shards.items()}
        return {
            file_name: {
                block for start, part in parts for block in range(start // BLOCK, -(-(start + part.numel()) // BLOCK))
            }
            for file_name, parts in self._locate(shards, flat).items()
        }

    @torch.no_grad()
    # Promise 15.
    def read_into(self, shards: Shards) -> None:
        """Fill every shard's `local` with its range of the stored tensor, one of another type after the other. Call
        `mismatches` first."""
        rounded = self.rounded(shards)
        for name, dtype in rounded.items():
            stored = torch.empty(shards[name].local.shape, dtype=DTYPES[dtype])
            self.read_into({name: replace(shards[name], local=stored)})
            shards[name].local.copy_(stored)
        shards = {name: shard for name, shard in shards.items() if name not in rounded}
        flat = {name: shard.local.detach().reshape(-1) for name, shard in shards.items()}
        for file_name, parts in self._locate(shards, flat).items():
            self._read(file_name, parts)
        for name, shard in shards.items():
            if flat[name].data_ptr() != shard.local.data_ptr():  # not contiguous: the view is a copy
                shard.local.copy_(flat[name].view(shard.local.shape))

    def _locate(self, shards: Shards, flat: Mapping[str, Tensor]) -> dict[str, list[tuple[int, Tensor]]]:
        """Of each file the positions of what is wanted of it, with the bytes of `flat` for them."""
        ranges = {name: (shard.start, shard.start + flat[name].numel()) for name, shard in shards.items()}
        wanted = {name: (start, stop) for name, (start, stop) in ranges.items() if start < stop}
        places: dict[str, list[tuple[int, Tensor]]] = {}
        for piece in self._index.find(wanted, self._rank, self._world_size):
            begin = ranges[piece.name][0]
            part = flat[piece.name][piece.start - begin : piece.stop - begin].view(torch.uint8)
            places.setdefault(f"{self._folder}/{piece.file}", []).append((piece.position, part))
        return places

    def _read(self, name: str, wanted: list[tuple[int, Tensor]]) -> None:
        """Fill the bytes of `wanted` from their positions in a file."""
        self._files.read(name, [(start, as_bytes(part)) for start, part in wanted if part.device.type == "cpu"])
        remote = [(start, part) for start, part in wanted if part.device.type != "cpu"]
        if remote:
            landing = torch.empty(LANDING_BYTES, dtype=torch.uint8, pin_memory=remote[0][1].device.type == "cuda")
            read_through(landing, self._files, name, remote)


def read_through(landing: Tensor, files: CheckedFiles, name: str, wanted: list[tuple[int, Tensor]]) -> None:
    """Fill the bytes of `wanted` from their positions in a file, a window of the file at a time, by way of the CPU
    tensor `landing`.

    Its size is a multiple of BLOCK, so that no block is read twice.
    """
    windows: dict[int, list[tuple[int, Tensor]]] = {}
    for start, part in wanted:
        while part.numel():
            offset = start % len(landing)
            length = min(len(landing) - offset, part.numel())
            windows.setdefault(start // len(landing), []).append((offset, part[:length]))
            start, part = start + length, part[length:]
    for number, parts in windows.items():
        places = [(offset, landing[offset : offset + part.numel()], part) for offset, part in parts]
        files.read(name, [(number * len(landing) + offset, as_bytes(place)) for offset, place, _ in places])
        for _, place, part in places:
            part.copy_(place)
