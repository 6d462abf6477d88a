"""Index of sharded tensors: which part of which tensor lies where in which file. Imports no torch.

`index.safetensors` has one int64 tensor, `shards`: rows as in `index_rows`, in the order in which the shards lie in the
files. The rows of one file are next to each other, so that a reader takes those of few files. Its metadata are JSON:
`tensors` (name -> type and shape; rows count them in the order of their names) and `files` (name, first byte of its
first shard, number of its rows). Up to format 7 every row was a range.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from rlhf.storage.boxes import Box, bounds, overlaps, range_box
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.index_rows import (
    ROW_BYTES,
    Parts,
    Table,
    Tensors,
    as_rows,
    covers,
    not_covered,
    parse_rows,
    ranges_not_covering,
)
from rlhf.storage.layout import INDEX
from rlhf.storage.reading import CheckedFiles

ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
"""Bytes of an element, by the names of the safetensors specification."""
TORCH_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""The same types as torch names them."""
FLOATS = {kind for kind, name in TORCH_NAMES.items() if "float" in name}
_MOST_BYTES = 1 << 60
"""More than any checkpoint has, and few enough for sums in int64."""


@dataclass(frozen=True)
class FileShards:
    """One rank's share of an index: the shards in its file, as `rows` in their order there, and a hash of the table of
    all tensors, which the ranks have in common. `rows` may be empty; then there is no such file."""

    file: str
    first_byte: int
    rows: bytes
    table: str


class Piece(NamedTuple):
    """Elements `box` of a tensor, as they are wanted, in the shard that lies at a byte `position` of a file and holds
    the part `shard`."""

    name: str
    box: Box
    file: str
    position: int
    shard: Box


def nbytes_of(kind: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor of a type and shape."""
    return ITEM_BYTES[kind] * math.prod(shape)


def hash_of_table(tensors: Tensors) -> str:
    """The same on all ranks that have the same tensors."""
    return xxhash.xxh3_128_hexdigest(json.dumps(sorted(tensors.items())).encode())


def parts_of_ranks(tensors: Tensors, shares: Sequence[FileShards]) -> Iterator[list[tuple[str, Box]]]:
    """Yield the parts of tensors in each rank's share, which together cover all tensors, each element once.

    Raises ValueError when ranks disagree about the tensors, when shards overlap, or when they leave a gap.
    """
    table = Table(tensors)
    _check(tensors, shares, table)
    for share in shares:
        parts = parse_rows(as_rows(share.rows), table)
        yield [(table.names[tensor], parts.box(i, table)) for i, tensor in enumerate(parts.tensor.tolist())]


def _check(tensors: Tensors, shares: Sequence[FileShards], table: Table) -> bytes:
    """The rows of all ranks. Raises as `parts_of_ranks`."""
    expected = hash_of_table(tensors)
    for rank, share in enumerate(shares):
        if share.table != expected:
            raise ValueError(f"ranks disagree about the tensors: rank {rank} has others than rank 0")
    content = b"".join(share.rows for share in shares)
    parts = parse_rows(as_rows(content), table)
    if (wrong := not_covered(parts, table)) is not None:
        name, size = table.names[wrong], int(table.sizes[wrong])
        found = sorted(parts.box(i, table) for i in np.flatnonzero(parts.tensor == wrong).tolist())
        shown = [_shown(box) for box in found[:10]]
        raise ValueError(f"the shards of {name} do not cover its {size} elements: {', '.join(shown)}")
    return content


def _shown(box: Box) -> str:
    return "x".join(f"[{start}:{start + size}]" for start, size in zip(box.offsets, box.sizes, strict=True))


def merge_shares(tensors: Tensors, shares: Sequence[FileShards]) -> bytes:
    """The index file, from the shares of all ranks. Raises ValueError as `parts_of_ranks`."""
    rows = _check(tensors, shares, Table(tensors))
    files = [(share.file, share.first_byte, len(share.rows) // ROW_BYTES) for share in shares if share.rows]
    metadata = {"tensors": json.dumps({name: tensors[name] for name in sorted(tensors)}), "files": json.dumps(files)}
    entry = {"dtype": "I64", "shape": [len(rows) // ROW_BYTES, 3], "data_offsets": [0, len(rows)]}
    head = json.dumps({"__metadata__": metadata, "shards": entry}, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    return len(head).to_bytes(8, "little") + head + rows


class ShardIndex:
    """Index of the folder `folder` of a checkpoint, of which only what is asked for is read.

    Raises DamagedCheckpoint for what is not as it was written, or could not have been written.
    """

    def __init__(self, files: CheckedFiles, folder: str) -> None:
        self._files, self._folder, self.path = files, folder, f"{folder}/{INDEX}"
        try:
            length = int.from_bytes(files.start(self.path, 8), "little")
            head = json.loads(files.start(self.path, 8 + length)[8:])
            self._take(head["__metadata__"])
            rows = (files.size(self.path) - 8 - length) / ROW_BYTES
            if (found := sum(self._count.tolist())) != rows:
                raise ValueError(f"its files have {found} rows of {rows:g}")
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, OverflowError) as error:
            raise DamagedCheckpoint(f"{self.path}: is no index ({type(error).__name__}: {error})") from None
        self._first_row = 8 + length

    def _take(self, metadata: dict[str, Any]) -> None:
        tensors, listed = json.loads(metadata["tensors"]), json.loads(metadata["files"])
        self.tensors: Tensors = {name: (dtype, tuple(shape)) for name, (dtype, shape) in sorted(tensors.items())}
        for dtype, shape in self.tensors.values():
            if dtype not in ITEM_BYTES or not all(type(size) is int and size >= 0 for size in shape):
                raise ValueError(f"a tensor of type {dtype!r} and shape {shape!r}")
        self._names = list(self.tensors)
        if sum(math.prod(shape) * ITEM_BYTES[dtype] for dtype, shape in self.tensors.values()) > _MOST_BYTES:
            raise ValueError("tensors that are too large")
        self._table = Table(self.tensors)
        self._width = np.array([ITEM_BYTES[dtype] for dtype, _ in self.tensors.values()], dtype=np.int64)
        for name, first, count in listed:
            if not isinstance(name, str) or not all(type(n) is int and 0 <= n <= _MOST_BYTES for n in (first, count)):
                raise ValueError(f"a file {name!r} with {count!r} shards from byte {first!r} on")
        self._file_names = [name for name, _, _ in listed]
        self._first_byte = np.array([first for _, first, _ in listed], dtype=np.int64)
        self._count = np.array([count for _, _, count in listed], dtype=np.int64)

    def counts(self) -> dict[str, int]:
        """The number of shards of each tensor."""
        parts, _, _ = self._read(np.arange(len(self._file_names)))
        found = np.bincount(parts.tensor, minlength=len(self._names))
        return dict(zip(self._names, found.tolist(), strict=True))

    def find(self, wanted: Mapping[str, Box], rank: int, world_size: int) -> list[Piece]:
        """Pieces of which parts of tensors consist, one part of each that is not empty.

        The rows of files are read in which a rank of this number probably finds its own, all others only if that was
        not enough.
        """
        for files in (self._probable(rank, world_size), np.arange(len(self._file_names))):
            pieces, missing = self._find(wanted, *self._read(files))
            if missing is None:
                return pieces
        assert missing is not None
        raise DamagedCheckpoint(f"{self.path}: has not all elements of {missing}{_shown(wanted[missing])}")

    def _find(
        self, wanted: Mapping[str, Box], parts: Parts, places: NDArray[np.intp], positions: NDArray[np.int64]
    ) -> tuple[list[Piece], str | None]:
        """The pieces in some shards, and a tensor of which they are not all that is wanted."""
        number = {name: i for i, name in enumerate(self._names)}
        first, size = np.zeros_like(self._table.sizes), np.zeros_like(self._table.sizes)
        with_boxes = np.zeros(len(self._names), dtype=bool)
        for name, box in wanted.items():
            begin, end = bounds(box, self.tensors[name][1])
            first[number[name]], size[number[name]] = begin, end - begin
            with_boxes[number[name]] = not box.is_range
        with_boxes[parts.tensor[parts.boxed]] = True
        low, high = np.maximum(parts.first, first[parts.tensor]), np.minimum(parts.stop, (first + size)[parts.tensor])
        hit = low < high
        flat = hit & ~with_boxes[parts.tensor]
        found = np.stack([parts.tensor, low, high], axis=1)[flat]
        wrong = ranges_not_covering(found, np.where(with_boxes, 0, size), first)
        if wrong is not None:
            return [], self._names[wrong]
        begins = positions[flat] + (low - parts.first)[flat] * self._width[found[:, 0]]
        pieces = []
        for (tensor, start, stop), place, position in zip(
            found.tolist(), places[flat].tolist(), begins.tolist(), strict=True
        ):
            box = range_box(start, stop)
            pieces.append(Piece(self._names[tensor], box, self._file_names[place], position, box))
        boxed: dict[str, list[Piece]] = {name: [] for name in wanted if with_boxes[number[name]]}
        for i in np.flatnonzero(hit & ~flat).tolist():
            name, shard = self._names[parts.tensor[i]], parts.box(i, self._table)
            file, position = self._file_names[places[i]], int(positions[i])
            common = overlaps(shard, wanted[name], self.tensors[name][1])
            boxed[name] += (Piece(name, box, file, position, shard) for box in common)
        for name, of_name in boxed.items():
            if not covers([piece.box for piece in of_name], self.tensors[name][1], wanted[name].numel):
                return [], name
            pieces += of_name
        return pieces, None

    def _probable(self, rank: int, world_size: int) -> NDArray[np.intp]:
        """Files of the same part of all ranks, of this rank, and of the first one, which has what is not sharded."""
        count = len(self._file_names)
        low, high = count * rank // world_size - 1, -(-count * (rank + 1) // world_size) + 1
        return np.array(sorted({n for n in (0, rank, *range(low, high)) if 0 <= n < count}), dtype=np.intp)

    def _read(self, files: NDArray[np.intp]) -> tuple[Parts, NDArray[np.intp], NDArray[np.int64]]:
        """The shards of these files, the file of each, and the byte in it at which the shard begins."""
        counts = self._count[files]
        begins = (np.cumsum(self._count) - self._count)[files]
        memory = bytearray(int(counts.sum()) * ROW_BYTES)
        view, ranges, done = memoryview(memory), [], 0
        for begin, count in zip(begins.tolist(), counts.tolist(), strict=True):
            if count:
                ranges.append((self._first_row + begin * ROW_BYTES, view[done : (done := done + count * ROW_BYTES)]))
        self._files.read(self.path, ranges)
        try:
            parts = parse_rows(as_rows(memory), self._table)
        except ValueError as error:
            raise DamagedCheckpoint(f"{self.path}: has {error}") from None
        length = parts.numel * self._width[parts.tensor]
        before = np.cumsum(length) - length
        of_row = np.repeat(files, counts)
        places = of_row[parts.row]
        # The first shard of each file, before which none of its bytes lie.
        opens = np.diff(places, prepend=-1) != 0
        if not np.array_equal(parts.row[opens], (np.cumsum(counts) - counts)[counts > 0]):
            raise DamagedCheckpoint(f"{self.path}: has boxes that begin in one file and end in another")
        at_first = np.maximum.accumulate(np.where(opens, before, 0))
        return parts, places, self._first_byte[places] + before - at_first
