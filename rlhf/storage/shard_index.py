"""Reads and writes the index of sharded tensors: the file and position of each part of each tensor. Imports no torch.

`index.safetensors` has one int64 tensor, `shards`: rows as in `index_rows`, in the order of the shards in the files.
The rows of one file are consecutive, so that a reader needs the rows of few files. The metadata are JSON: `tensors`
(name -> type and shape) and `files` (name, first byte of the first shard, number of rows). Up to format 7 all shards
are ranges.
"""

import json
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
    find_uncovered,
    find_uncovered_range,
    parse_rows,
)
from rlhf.storage.layout import INDEX
from rlhf.storage.reading import CheckedFiles
from rlhf.storage.safetensors_header import ITEM_BYTES, MOST_BYTES, is_shape, make_safetensors_header, nbytes_of


@dataclass(frozen=True)
class FileShards:
    """One rank's part of an index: the shards in its file.

    `rows` are the shards' rows in the order of the file; without rows there is no file. `table` is a hash of the names,
    types and shapes of all tensors, which must be the same on all ranks.
    """

    file: str
    first_byte: int
    rows: bytes
    table: str


class Piece(NamedTuple):
    """A wanted part `box` of a tensor, and the stored part `shard` that contains it. The row-major bytes of `shard`
    begin at byte `position` of `file`."""

    name: str
    box: Box
    file: str
    position: int
    shard: Box


def hash_of_table(tensors: Tensors) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(sorted(tensors.items())).encode())


def parts_of_ranks(tensors: Tensors, shares: Sequence[FileShards]) -> Iterator[list[tuple[str, Box]]]:
    """Yield the parts of tensors in each rank's share. Raises ValueError when ranks disagree about the tensors, or the
    shards do not cover each element exactly once."""
    table = Table(tensors)
    _check(tensors, shares, table)
    for share in shares:
        parts = parse_rows(as_rows(share.rows), table)
        yield [(table.names[tensor], parts.box(i, table)) for i, tensor in enumerate(parts.tensor.tolist())]


def _check(tensors: Tensors, shares: Sequence[FileShards], table: Table) -> bytes:
    """Return the bytes of all ranks' rows. Raises ValueError as `parts_of_ranks`."""
    expected = hash_of_table(tensors)
    for rank, share in enumerate(shares):
        if share.table != expected:
            raise ValueError(f"ranks disagree about the tensors: rank {rank} has other tensors than rank 0")
    content = b"".join(share.rows for share in shares)
    parts = parse_rows(as_rows(content), table)
    if (wrong := find_uncovered(parts, table)) is not None:
        name, size = table.names[wrong], int(table.sizes[wrong])
        found = sorted(parts.box(i, table) for i in np.flatnonzero(parts.tensor == wrong).tolist())
        shown = [_shown(box) for box in found[:10]]
        raise ValueError(f"the shards of {name} do not cover its {size} elements: {', '.join(shown)}")
    return content


def _shown(box: Box) -> str:
    return "x".join(f"[{start}:{start + size}]" for start, size in zip(box.offsets, box.sizes, strict=True))


def merge_shares(tensors: Tensors, shares: Sequence[FileShards]) -> bytes:
    """Return the bytes of the index file. Raises ValueError as `parts_of_ranks`."""
    rows = _check(tensors, shares, Table(tensors))
    files = [(share.file, share.first_byte, len(share.rows) // ROW_BYTES) for share in shares if share.rows]
    metadata = {"tensors": json.dumps({name: tensors[name] for name in sorted(tensors)}), "files": json.dumps(files)}
    return make_safetensors_header({"shards": ("I64", (len(rows) // ROW_BYTES, 3))}, metadata) + rows


class ShardIndex:
    """Reads the index of the checkpoint's folder `folder`; each call reads only the rows that it needs. The constructor
    and every method raise DamagedCheckpoint if the index is damaged or inconsistent."""

    def __init__(self, files: CheckedFiles, folder: str) -> None:
        self._files, self._folder, self.path = files, folder, f"{folder}/{INDEX}"
        try:
            length = int.from_bytes(files.start(self.path, 8), "little")
            head = json.loads(files.start(self.path, 8 + length)[8:])
            self._parse_metadata(head["__metadata__"])
            rows = (files.size(self.path) - 8 - length) / ROW_BYTES
            if (found := sum(self._count.tolist())) != rows:
                raise ValueError(f"its files list {found} rows instead of {rows:g}")
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, OverflowError) as error:
            raise DamagedCheckpoint(f"{self.path}: is not a valid index ({type(error).__name__}: {error})") from None
        self._first_row = 8 + length

    def _parse_metadata(self, metadata: dict[str, Any]) -> None:
        tensors, listed = json.loads(metadata["tensors"]), json.loads(metadata["files"])
        self.tensors: Tensors = {name: (dtype, tuple(shape)) for name, (dtype, shape) in sorted(tensors.items())}
        for dtype, shape in self.tensors.values():
            if dtype not in ITEM_BYTES or not is_shape(shape):
                raise ValueError(f"a tensor of type {dtype!r} and shape {shape!r}")
        self._names = list(self.tensors)
        if sum(nbytes_of(dtype, shape) for dtype, shape in self.tensors.values()) > MOST_BYTES:
            raise ValueError("tensors that are too large")
        self._table = Table(self.tensors)
        self._width = np.array([ITEM_BYTES[dtype] for dtype, _ in self.tensors.values()], dtype=np.int64)
        for name, first, count in listed:
            if not isinstance(name, str) or not all(type(n) is int and 0 <= n <= MOST_BYTES for n in (first, count)):
                raise ValueError(f"a file {name!r} with {count!r} shards from byte {first!r} on")
        self._file_names = [name for name, _, _ in listed]
        self._first_byte = np.array([first for _, first, _ in listed], dtype=np.int64)
        self._count = np.array([count for _, _, count in listed], dtype=np.int64)

    def counts(self) -> dict[str, int]:
        parts, _, _ = self._read(np.arange(len(self._file_names)))
        found = np.bincount(parts.tensor, minlength=len(self._names))
        return dict(zip(self._names, found.tolist(), strict=True))

    def find(self, wanted: Mapping[str, Box], rank: int, world_size: int) -> list[Piece]:
        """Return the pieces that make up the wanted parts (tensor name -> one part, not empty). First reads the rows of
        the files in which this rank probably finds its parts, and all files' rows only if needed."""
        for files in (self._probable(rank, world_size), np.arange(len(self._file_names))):
            pieces, missing = self._find(wanted, *self._read(files))
            if missing is None:
                return pieces
        assert missing is not None
        raise DamagedCheckpoint(f"{self.path}: lacks elements of {missing}{_shown(wanted[missing])}")

    def _find(
        self, wanted: Mapping[str, Box], parts: Parts, file_numbers: NDArray[np.intp], positions: NDArray[np.int64]
    ) -> tuple[list[Piece], str | None]:
        """Return the wanted pieces and None. If the shards lack elements, return no pieces and a tensor with a gap."""
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
        wrong = find_uncovered_range(found, np.where(with_boxes, 0, size), first)
        if wrong is not None:
            return [], self._names[wrong]
        begins = positions[flat] + (low - parts.first)[flat] * self._width[found[:, 0]]
        pieces = []
        for (tensor, start, stop), file_number, position in zip(
            found.tolist(), file_numbers[flat].tolist(), begins.tolist(), strict=True
        ):
            box = range_box(start, stop)
            pieces.append(Piece(self._names[tensor], box, self._file_names[file_number], position, box))
        boxed: dict[str, list[Piece]] = {name: [] for name in wanted if with_boxes[number[name]]}
        for i in np.flatnonzero(hit & ~flat).tolist():
            name, shard = self._names[parts.tensor[i]], parts.box(i, self._table)
            file, position = self._file_names[file_numbers[i]], int(positions[i])
            common = overlaps(shard, wanted[name], self.tensors[name][1])
            boxed[name] += (Piece(name, box, file, position, shard) for box in common)
        for name, of_name in boxed.items():
            if not covers([piece.box for piece in of_name], self.tensors[name][1], wanted[name].numel):
                return [], name
            pieces += of_name
        return pieces, None

    def _probable(self, rank: int, world_size: int) -> NDArray[np.intp]:
        """Return the files in which this rank probably finds its parts: the files at the rank's relative position among
        all files, the file number `rank`, and the first file, which has the tensors that are not sharded."""
        count = len(self._file_names)
        low, high = count * rank // world_size - 1, -(-count * (rank + 1) // world_size) + 1
        return np.array(sorted({n for n in (0, rank, *range(low, high)) if 0 <= n < count}), dtype=np.intp)

    def _read(self, files: NDArray[np.intp]) -> tuple[Parts, NDArray[np.intp], NDArray[np.int64]]:
        """Return the shards of some files, and for each shard its file and first byte."""
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
        file_numbers = of_row[parts.row]
        # Mark the first shard of each file, from which the bytes are counted.
        opens = np.diff(file_numbers, prepend=-1) != 0
        if not np.array_equal(parts.row[opens], (np.cumsum(counts) - counts)[counts > 0]):
            raise DamagedCheckpoint(f"{self.path}: has boxes that begin in one file and end in another")
        at_first = np.maximum.accumulate(np.where(opens, before, 0))
        return parts, file_numbers, self._first_byte[file_numbers] + before - at_first
