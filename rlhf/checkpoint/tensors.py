"""The logical format of tensors: a name, a global shape, and shards that are ranges of the flattened (row-major) tensor.

FSDP2's rows, ZeRO's flat partitions and an unsharded tensor are all such ranges, so what one backend wrote at one world size any other
reads at any other. Shards lie in safetensors files, one per rank, as 1-D tensors; `index.json` beside them says which range is where.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf.checkpoint.errors import DamagedCheckpoint
from rlhf.checkpoint.files import WrittenFile, write_file

INDEX = "index.json"
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


@dataclass(frozen=True)
class Piece:
    """One rank's part of a named tensor.

    `local` is contiguous and holds elements [start, start + local.numel()) of the flattened tensor of `shape`. `owner` says whether this
    rank saves it (a replicated tensor has one owner); every rank loads what its `local` covers.
    """

    shape: tuple[int, ...]
    start: int
    local: Tensor
    owner: bool = True


Pieces = Mapping[str, Piece]
"""Tensor name -> this rank's part."""


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor; writing to the view writes to the tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def safetensors_chunks(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file, tensor by tensor, without a copy of CPU tensors: ready to be hashed and written."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors.values():
        if tensor.numel():
            yield as_bytes(tensor.cpu().contiguous())


def write_pieces(root: Path, folder: str, file_name: str, pieces: Pieces) -> tuple[list[WrittenFile], dict[str, Any]]:
    """Write the pieces that this rank owns to `folder/file_name`; returns the file and this rank's share of the index.

    The share names every piece, owned or not, so that the merge sees a tensor that no rank owns.
    """
    owned = {name: piece for name, piece in pieces.items() if piece.owner and piece.local.numel()}
    index = {
        name: {
            "dtype": DTYPE_NAMES[piece.local.dtype],
            "shape": list(piece.shape),
            "shards": [{"file": file_name, "start": piece.start, "stop": piece.start + piece.local.numel()}]
            if name in owned
            else [],
        }
        for name, piece in pieces.items()
    }
    if not owned:
        return [], index
    flat = {name: piece.local.detach().reshape(-1) for name, piece in owned.items()}
    return [write_file(root, f"{folder}/{file_name}", safetensors_chunks(flat))], index


def merge_indices(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The component's index from the ranks' shares, shards in order. Raises ValueError when shards overlap or leave a gap."""
    merged: dict[str, Any] = {}
    for part in parts:
        for name, entry in part.items():
            known = merged.setdefault(name, {**entry, "shards": []})
            if (known["dtype"], known["shape"]) != (entry["dtype"], entry["shape"]):
                raise ValueError(
                    f"ranks disagree about {name}: {known['dtype']}{known['shape']} and {entry['dtype']}{entry['shape']}"
                )
            known["shards"].extend(entry["shards"])
    for name, entry in merged.items():
        entry["shards"].sort(key=lambda shard: shard["start"])
        position = 0
        for shard in entry["shards"]:
            if shard["start"] != position:
                raise ValueError(f"the shards of {name} do not cover it: {entry['shards']}")
            position = shard["stop"]
        if position != _numel(entry["shape"]):
            raise ValueError(f"the shards of {name} end at {position} of {_numel(entry['shape'])}")
    return merged


def _numel(shape: list[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


class TensorReader:
    """Reads ranges of the tensors in one folder, whatever world size or backend wrote them."""

    def __init__(self, folder: Path, index: dict[str, Any]) -> None:
        self._folder = folder
        self.index = index
        self._headers: dict[str, tuple[int, dict[str, Any]]] = {}

    @classmethod
    def of_component(cls, folder: Path) -> "TensorReader":
        """Over what `write_pieces` wrote."""
        return cls(folder, json.loads((folder / INDEX).read_text()))

    @classmethod
    def of_whole_tensors(cls, folder: Path, file_names: Iterable[str]) -> "TensorReader":
        """Over plain safetensors files of `folder`, such as a Hugging Face folder's, each tensor whole in one of them."""
        reader = cls(folder, {})
        for file_name in file_names:
            for name, entry in reader._header(file_name)[1].items():
                if name != "__metadata__":
                    shard = {"file": file_name, "start": 0, "stop": _numel(entry["shape"])}
                    reader.index[name] = {"dtype": entry["dtype"], "shape": entry["shape"], "shards": [shard]}
        return reader

    def _header(self, file_name: str) -> tuple[int, dict[str, Any]]:
        if file_name not in self._headers:
            with (self._folder / file_name).open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                self._headers[file_name] = (8 + length, json.loads(file.read(length)))
        return self._headers[file_name]

    def mismatches(self, pieces: Pieces) -> list[str]:
        """How the stored names, shapes and types differ from those of `pieces`; empty when they are the same architecture."""
        stored = {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in self.index.items()}
        wanted = {name: (DTYPE_NAMES[piece.local.dtype], piece.shape) for name, piece in pieces.items()}
        lines = [f"{name} is not in the checkpoint" for name in wanted.keys() - stored.keys()]
        lines += [f"{name} is only in the checkpoint" for name in stored.keys() - wanted.keys()]
        both = stored.keys() & wanted.keys()
        lines += [
            f"{name} is {stored[name]} in the checkpoint, {wanted[name]} here"
            for name in both
            if stored[name] != wanted[name]
        ]
        return sorted(lines)

    @torch.no_grad()
    def read_into(self, pieces: Pieces) -> None:
        """Fill every piece's `local` with its range of the stored tensor. Call `mismatches` first."""
        for name, piece in pieces.items():
            if not piece.local.numel():
                continue
            buffer = (
                piece.local.reshape(-1)
                if piece.local.device.type == "cpu"
                else torch.empty(piece.local.numel(), dtype=piece.local.dtype)
            )
            self._read_range(name, piece.start, buffer)
            if buffer.data_ptr() != piece.local.data_ptr():
                piece.local.copy_(buffer.view(piece.local.shape))

    def _read_range(self, name: str, start: int, into: Tensor) -> None:
        stop, width, filled = start + into.numel(), into.element_size(), 0
        memory = as_bytes(into)
        for shard in self.index[name]["shards"]:
            low, high = max(start, shard["start"]), min(stop, shard["stop"])
            if low >= high:
                continue
            base, header = self._header(shard["file"])
            position = base + header[name]["data_offsets"][0] + (low - shard["start"]) * width
            with (self._folder / shard["file"]).open("rb", buffering=0) as file:
                file.seek(position)
                view = memory[(low - start) * width : (high - start) * width]
                while view:
                    count = file.readinto(view)
                    if not count:
                        raise DamagedCheckpoint(f"{self._folder / shard['file']} ends inside {name}")
                    view = view[count:]
            filled += high - low
        if filled != into.numel():
            raise DamagedCheckpoint(
                f"{self._folder / INDEX} has {filled} of {into.numel()} elements of {name}[{start}:{stop}]"
            )
