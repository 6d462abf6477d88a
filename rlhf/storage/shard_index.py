"""Index of sharded tensors: which range of which tensor lies where in which file. Imports no torch.

`index.safetensors` has one int64 tensor, `shards`: a row (tensor, start, stop) for each shard, in the order in which
the shards lie in the files. The rows of one file are next to each other, so that a reader takes those of few files. Its
metadata are JSON: `tensors` (name -> type and shape; rows count them in the order of their names) and `files` (name,
first byte of its first shard, number of its rows).
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from rlhf.storage.disk_errors import DamagedCheckpoint
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
ROW_BYTES = 24
_MOST_BYTES = 1 << 60
"""More than any checkpoint has, and few enough for sums in int64."""
_ROW = np.dtype("<i8")
Rows = NDArray[np.int64]
"""[n, 3]: tensor, start, stop."""
Tensors = Mapping[str, tuple[str, tuple[int, ...]]]
"""Tensor name -> type and shape."""


@dataclass(frozen=True)
class FileShards:
    """One rank's share of an index: the shards in its file, as `rows` in their order there, and a hash of the table of
    all tensors, which the ranks have in common. `rows` may be empty; then there is no such file."""

    file: str
    first_byte: int
    rows: bytes
    table: str


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of a flattened tensor, at a byte `position` of a file."""

    name: str
    start: int
    stop: int
    file: str
    position: int


def nbytes_of(kind: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor of a type and shape."""
    return ITEM_BYTES[kind] * math.prod(shape)


def hash_of_table(tensors: Tensors) -> str:
    """The same on all ranks that have the same tensors."""
    return xxhash.xxh3_128_hexdigest(json.dumps(sorted(tensors.items())).encode())


def rows_of(numbered: Iterable[tuple[int, int, int]]) -> bytes:
    """Rows (tensor, start, stop) as they lie in an index."""
    return np.array(list(numbered), dtype=_ROW).tobytes()


def rows_of_ranks(tensors: Tensors, shares: Sequence[FileShards]) -> list[Rows]:
    """The rows of each rank's share, which together cover all tensors, each element once.

    Raises ValueError when ranks disagree about the tensors, when shards overlap, or when they leave a gap.
    """
    expected = hash_of_table(tensors)
    for rank, share in enumerate(shares):
        if share.table != expected:
            raise ValueError(f"ranks disagree about the tensors: rank {rank} has others than rank 0")
    by_rank = [_as_rows(share.rows) for share in shares]
    rows = np.concatenate(by_rank)
    names = sorted(tensors)
    if (wrong := _not_covered(rows, _sizes(tensors))) is not None:
        name = names[wrong]
        found = sorted((start, stop) for number, start, stop in rows.tolist() if number == wrong)
        raise ValueError(f"the shards of {name} do not cover its {math.prod(tensors[name][1])} elements: {found[:10]}")
    return by_rank


def merge_shares(tensors: Tensors, shares: Sequence[FileShards]) -> bytes:
    """The index file, from the shares of all ranks. Raises ValueError as `rows_of_ranks`."""
    rows = np.concatenate(rows_of_ranks(tensors, shares))
    written, names = [share for share in shares if share.rows], sorted(tensors)
    files = [(share.file, share.first_byte, len(share.rows) // ROW_BYTES) for share in written]
    metadata = {"tensors": json.dumps({name: tensors[name] for name in names}), "files": json.dumps(files)}
    entry = {"dtype": "I64", "shape": list(rows.shape), "data_offsets": [0, rows.nbytes]}
    head = json.dumps({"__metadata__": metadata, "shards": entry}, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    return len(head).to_bytes(8, "little") + head + rows.tobytes()


def _as_rows(content: bytes | bytearray) -> Rows:
    return np.frombuffer(content, dtype=_ROW).reshape(-1, 3)


def _sizes(tensors: Tensors) -> NDArray[np.int64]:
    """Elements of each tensor, in the order of names."""
    return np.array([math.prod(tensors[name][1]) for name in sorted(tensors)], dtype=np.int64)


def _not_covered(rows: Rows, sizes: NDArray[np.int64], first: NDArray[np.int64] | None = None) -> int | None:
    """A tensor of which the rows do not cover the elements from `first` (0) on, `sizes` many, each once; None if they
    cover all."""
    first = np.zeros_like(sizes) if first is None else first
    rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
    number, start, stop = rows.T
    begins = np.diff(number, prepend=-1) != 0
    wrong = start != np.where(begins, first[number], np.roll(stop, 1))
    wrong |= np.diff(number, append=-1).astype(bool) & (stop != (first + sizes)[number])
    missing = sizes.astype(bool)
    missing[number] = False
    bad = np.concatenate([number[wrong], np.flatnonzero(missing)])
    return int(bad[0]) if len(bad) else None


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
        self._sizes = _sizes(self.tensors)
        self._width = np.array([ITEM_BYTES[dtype] for dtype, _ in self.tensors.values()], dtype=np.int64)
        for name, first, count in listed:
            if not isinstance(name, str) or not all(type(n) is int and 0 <= n <= _MOST_BYTES for n in (first, count)):
                raise ValueError(f"a file {name!r} with {count!r} shards from byte {first!r} on")
        self._file_names = [name for name, _, _ in listed]
        self._first_byte = np.array([first for _, first, _ in listed], dtype=np.int64)
        self._count = np.array([count for _, _, count in listed], dtype=np.int64)

    def counts(self) -> dict[str, int]:
        """The number of shards of each tensor."""
        rows, _, _ = self._read(np.arange(len(self._file_names)))
        found = np.bincount(rows[:, 0], minlength=len(self._names))
        return dict(zip(self._names, found.tolist(), strict=True))

    def find(self, wanted: Mapping[str, tuple[int, int]], rank: int, world_size: int) -> list[Piece]:
        """Pieces of which ranges of tensors consist, one range (start, stop) of each.

        The rows of files are read in which a rank of this number probably finds its own, all others only if that was
        not enough.
        """
        number = {name: i for i, name in enumerate(self._names)}
        first, size = np.zeros_like(self._sizes), np.zeros_like(self._sizes)
        for name, (start, stop) in wanted.items():
            first[number[name]], size[number[name]] = start, stop - start
        every = np.arange(len(self._file_names))
        for files in (self._probable(rank, world_size), every):
            rows, places, positions = self._read(files)
            tensor = rows[:, 0]
            low = np.maximum(rows[:, 1], first[tensor])
            high = np.minimum(rows[:, 2], (first + size)[tensor])
            hit = low < high
            found = np.stack([tensor, low, high], axis=1)[hit]
            wrong = _not_covered(found, size, first)
            if wrong is None:
                break
        else:
            start, stop = wanted[self._names[wrong]] if wrong is not None else (0, 0)
            raise DamagedCheckpoint(f"{self.path}: has not all elements of {self._names[wrong or 0]}[{start}:{stop}]")
        positions = positions[hit] + (low - rows[:, 1])[hit] * self._width[found[:, 0]]
        where = zip(found.tolist(), places[hit].tolist(), positions.tolist(), strict=True)
        return [
            Piece(self._names[tensor], start, stop, self._file_names[place], position)
            for (tensor, start, stop), place, position in where
        ]

    def _probable(self, rank: int, world_size: int) -> NDArray[np.intp]:
        """Files of the same part of all ranks, of this rank, and of the first one, which has what is not sharded."""
        count = len(self._file_names)
        low, high = count * rank // world_size - 1, -(-count * (rank + 1) // world_size) + 1
        return np.array(sorted({n for n in (0, rank, *range(low, high)) if 0 <= n < count}), dtype=np.intp)

    def _read(self, files: NDArray[np.intp]) -> tuple[Rows, NDArray[np.intp], NDArray[np.int64]]:
        """The rows of these files, the file of each row, and the byte in it at which the shard begins."""
        counts = self._count[files]
        begins = (np.cumsum(self._count) - self._count)[files]
        memory = bytearray(int(counts.sum()) * ROW_BYTES)
        view, ranges, done = memoryview(memory), [], 0
        for begin, count in zip(begins.tolist(), counts.tolist(), strict=True):
            if count:
                ranges.append((self._first_row + begin * ROW_BYTES, view[done : (done := done + count * ROW_BYTES)]))
        self._files.read(self.path, ranges)
        rows = _as_rows(memory)
        number, start, stop = rows.T
        if len(rows) and (number.min() < 0 or number.max() >= len(self._names)):
            raise DamagedCheckpoint(f"{self.path}: has rows of tensors that are not there")
        if not bool(np.all((start >= 0) & (start < stop) & (stop <= self._sizes[number]))):
            raise DamagedCheckpoint(f"{self.path}: has ranges outside of their tensors")
        places = np.repeat(files, counts)
        length = (stop - start) * self._width[number]
        before = np.cumsum(length) - length
        rows_before = np.cumsum(counts) - counts
        at_first = before[np.minimum(rows_before, max(len(rows) - 1, 0))] if len(rows) else rows_before
        return rows, places, np.repeat(self._first_byte[files] - at_first, counts) + before
