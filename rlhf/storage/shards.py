"""Tensors on disk as shards: a name, a global shape, and ranges of the flattened (row-major) tensor.

FSDP2's rows, ZeRO's flat partitions and an unsharded tensor are all such ranges, so what one backend wrote at one world
size any other reads at any other. Shards lie in safetensors files, one per rank, as 1-D tensors; `index.json` beside
them says which range is where, down to the byte of the file.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.files import WrittenFile, write_file
from rlhf.storage.hashing import BLOCK
from rlhf.storage.index import INDEX, read_index, read_safetensors_header
from rlhf.storage.reading import CheckedFiles

# Page-locked memory through which tensors reach another device.
LANDING_BYTES = 16 * BLOCK
# Names as in the safetensors specification.
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
ITEM_BYTES = {name: dtype.itemsize for dtype, name in DTYPE_NAMES.items()}


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
    yield _header(tensors, metadata)[0]
    for tensor in tensors.values():
        if tensor.numel():
            yield as_bytes(tensor.cpu().contiguous())


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> tuple[bytes, dict[str, int]]:
    """What a safetensors file begins with, and where in the file each tensor begins."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    starts, end = {}, 0
    for name, tensor in tensors.items():
        starts[name], end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [starts[name], end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    content = len(text).to_bytes(8, "little") + text
    return content, {name: len(content) + start for name, start in starts.items()}


def write_shards(root: Path, folder: str, file_name: str, shards: Shards) -> tuple[list[WrittenFile], dict[str, Any]]:
    """Write the shards that this rank owns to `folder/file_name`; returns the file and this rank's share of the index.

    The share names every shard, owned or not, so that the merge sees a tensor that no rank owns.
    """
    flat = {name: p.local.detach().reshape(-1) for name, p in shards.items() if p.owner and p.local.numel()}
    # Step counts, which one rank writes and all read, next to each other: scattered, they would make all ranks read all
    # of its file.
    flat = dict(sorted(flat.items(), key=lambda item: item[1].numel() > 1))
    offsets = _header(flat)[1]
    index = {}
    for name, shard in shards.items():
        stored = {"file": file_name, "start": shard.start, "stop": shard.start + shard.local.numel()}
        index[name] = {
            "dtype": DTYPE_NAMES[shard.local.dtype],
            "shape": list(shard.shape),
            "shards": [stored | {"offset": offsets[name]}] if name in flat else [],
        }
    if not flat:
        return [], index
    return [write_file(root, f"{folder}/{file_name}", safetensors_chunks(flat))], index


def merge_indices(shares: list[dict[str, Any]]) -> dict[str, Any]:
    """The component's index from the ranks' shares, shards in order.

    Raises ValueError when shards overlap or leave a gap.
    """
    merged: dict[str, Any] = {}
    for share in shares:
        for name, entry in share.items():
            known = merged.setdefault(name, {**entry, "shards": []})
            if (known["dtype"], known["shape"]) != (entry["dtype"], entry["shape"]):
                raise ValueError(
                    f"ranks disagree about {name}: {known['dtype']}{known['shape']} and "
                    f"{entry['dtype']}{entry['shape']}"
                )
            known["shards"].extend(entry["shards"])
    for name, entry in merged.items():
        entry["shards"].sort(key=lambda stored: stored["start"])
        position = 0
        for stored in entry["shards"]:
            if stored["start"] != position:
                raise ValueError(f"the shards of {name} do not cover it: {entry['shards']}")
            position = stored["stop"]
        if position != _numel(entry["shape"]):
            raise ValueError(f"the shards of {name} end at {position} of {_numel(entry['shape'])}")
    return merged


def _numel(shape: list[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


class TensorReader:
    """Reads ranges of the tensors in one folder of a checkpoint, whatever world size or backend wrote them."""

    def __init__(self, files: CheckedFiles, folder: str, index: dict[str, Any]) -> None:
        self._files, self._folder = files, folder
        self.index = index

    @classmethod
    def of_component(cls, files: CheckedFiles, folder: str) -> "TensorReader":
        """A reader of what `write_shards` wrote."""
        return cls(files, folder, read_index(files, folder))

    @classmethod
    def of_whole_tensors(cls, files: CheckedFiles, folder: str, file_names: Iterable[str]) -> "TensorReader":
        """A reader of plain safetensors files of `folder`, such as a Hugging Face folder's, each tensor whole in one
        of them."""
        index = {}
        for file_name in file_names:
            header, length = read_safetensors_header(files, f"{folder}/{file_name}")
            for name, entry in header.items():
                size = _numel(entry["shape"])
                stored = {"file": file_name, "start": 0, "stop": size}
                begin, end = entry["data_offsets"]
                if end - begin != ITEM_BYTES.get(entry["dtype"], 0) * size:
                    raise DamagedCheckpoint(f"{folder}/{file_name}: says that {name} has {end - begin} bytes")
                offset = length + begin
                index[name] = {
                    "dtype": entry["dtype"],
                    "shape": entry["shape"],
                    "shards": [stored | {"offset": offset}],
                }
        return cls(files, folder, index)

    def mismatches(self, shards: Shards) -> list[str]:
        """Differences of the stored names, shapes and types from those of `shards`; none when they are the same
        architecture."""
        stored = {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in self.index.items()}
        wanted = {name: (DTYPE_NAMES[shard.local.dtype], shard.shape) for name, shard in shards.items()}
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
        wanted: dict[str, list[tuple[int, Tensor]]] = {}
        for name, shard in shards.items():
            if shard.local.numel():
                self._locate(name, shard.start, shard.local.detach().reshape(-1), wanted)
        return {
            f"{self._folder}/{file_name}": {
                block for start, part in parts for block in range(start // BLOCK, -(-(start + part.numel()) // BLOCK))
            }
            for file_name, parts in wanted.items()
        }

    @torch.no_grad()
    # Promise 15.
    def read_into(self, shards: Shards) -> None:
        """Fill every shard's `local` with its range of the stored tensor. Call `mismatches` first."""
        wanted: dict[str, list[tuple[int, Tensor]]] = {}
        copies = []
        for name, shard in shards.items():
            flat = shard.local.detach().reshape(-1)
            if flat.numel():
                self._locate(name, shard.start, flat, wanted)
            if flat.data_ptr() != shard.local.data_ptr():  # not contiguous: the view is a copy
                copies.append((shard.local, flat))
        for file_name, parts in wanted.items():
            self._read(f"{self._folder}/{file_name}", parts)
        for local, flat in copies:
            local.copy_(flat.view(local.shape))

    def _locate(self, name: str, start: int, into: Tensor, wanted: dict[str, list[tuple[int, Tensor]]]) -> None:
        """Add to `wanted` where in which files the elements of a tensor from `start` on lie, with the parts of `into`
        for them."""
        stop, filled = start + into.numel(), 0
        for stored in self.index[name]["shards"]:
            low, high = max(start, stored["start"]), min(stop, stored["stop"])
            if low < high:
                position = stored["offset"] + (low - stored["start"]) * into.element_size()
                part = into[low - start : high - start].view(torch.uint8)
                wanted.setdefault(stored["file"], []).append((position, part))
                filled += high - low
        if filled != into.numel():
            raise DamagedCheckpoint(
                f"{self._folder}/{INDEX}: has {filled} of {into.numel()} elements of {name}[{start}:{stop}]"
            )

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
