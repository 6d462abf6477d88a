"""Describes tensors in files (path, offset, shape, dtype) and reads ranges without mapping the file."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf.convert.pickles import Allowed, StandIn, TensorStandIn, open_archive, restrict_unpickling
from rlhf.convert.record_sum import RecordSum
from rlhf.models.hf.named_tensors import JoinedTensor
from rlhf.models.hf.source import TensorInfo
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.shards import as_bytes

MOST_EXPANDED = 64 << 20
"""A tensor with repeated elements (stride 0) may be larger than its file, by at most this many bytes."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, from byte `byte` on; no element is in memory."""

    path: Path
    byte: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None
    """None for a row-major tensor."""
    record: RecordSum | None = field(default=None, compare=False)

    @property
    def info(self) -> TensorInfo:
        return TensorInfo(self.shape, self.dtype)

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    def read(self, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of the flattened (row-major) tensor, 1-D. A tensor that is not row-major on
        disk is read whole. Raises DamagedCheckpoint when the file ends too early."""
        if self.stride is None:
            return self._elements(start, stop)
        span = 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        whole = self._elements(0, span if self.numel else 0)
        return whole.as_strided(self.shape, self.stride).reshape(-1)[start:stop].clone()

    def _elements(self, start: int, stop: int) -> Tensor:
        tensor = torch.empty(stop - start, dtype=self.dtype)
        view, position = as_bytes(tensor), self.byte + start * self.dtype.itemsize
        with self.path.open("rb", buffering=0) as file:
            while view:
                if not (count := os.preadv(file.fileno(), [view], position)):
                    raise DamagedCheckpoint(f"{self.path} is truncated: it ends at byte {position}")
                if self.record is not None:
                    self.record.update(file.fileno(), position, view[:count])
                view, position = view[count:], position + count
        return tensor


@dataclass(frozen=True)
class StoredWrapper:
    """A tensor subclass that only wraps other tensors, such as a DTensor: its class, shape and state."""

    kind: str
    shape: tuple[int, ...]
    state: Any


Piece = tuple[StoredTensor, int, int]
"""Elements [start, stop) of a stored tensor."""


def as_pieces(tensors: Iterable[StoredTensor]) -> list[Piece]:
    return [(tensor, 0, tensor.numel) for tensor in tensors]


def numel_of(pieces: Sequence[Piece]) -> int:
    return sum(stop - start for _, start, stop in pieces)


def join_pieces(shape: Sequence[int], dtype: torch.dtype, pieces: Sequence[Piece]) -> JoinedTensor:
    """Return a tensor that consists of `pieces`. Raises DamagedCheckpoint for a piece of another dtype."""
    if odd := next((tensor for tensor, _, _ in pieces if tensor.dtype != dtype), None):
        raise DamagedCheckpoint(f"{odd.path} has {odd.dtype} instead of {dtype}: the files are not all of one save")
    return JoinedTensor(TensorInfo(tuple(shape), dtype), pieces)


def open_torch_file(path: Path, allowed: Allowed = (), *, start: int = 0, size: int | None = None) -> Any:
    """Load a file of `torch.save`, or the `size` bytes from `start` on, without reading tensors. A StoredTensor
    replaces each tensor, and a StoredWrapper each TensorStandIn. Raises UserError for classes other
    than tensors, plain containers and `allowed`, and DamagedCheckpoint for a truncated file or another kind of file."""
    with open_archive(path, start, size) as part, restrict_unpickling(path, allowed):
        content = torch.load(part, map_location="meta", weights_only=True)
        return _Locator(path, start, part.records).of(content)


def open_mapping(path: Path, allowed: Allowed, tool: str) -> dict[str, Any]:
    """Load a file of `torch.save` that contains a dictionary, as `tool` writes it."""
    content = open_torch_file(path, allowed)
    if not isinstance(content, dict):
        raise DamagedCheckpoint(f"{path} is not a file of {tool}: it contains a {type(content).__name__}")
    return content


class _Locator:
    """Replaces each tensor on the meta device by a StoredTensor."""

    def __init__(self, path: Path, start: int, records: Mapping[int, tuple[int, int]]) -> None:
        self._path, self._start, self._records = path, start, records
        self._sums = {first: RecordSum(path, start + first, start + end, crc) for first, (end, crc) in records.items()}

    def of(self, content: Any) -> Any:
        if isinstance(content, TensorStandIn):
            return StoredWrapper(type(content).__name__, tuple(content.shape), self.of(content.state))
        if isinstance(content, Tensor):
            return self._of_tensor(content)
        if isinstance(content, StandIn):
            content.arguments, content.state = self.of(content.arguments), self.of(content.state)
        if isinstance(content, dict):
            return {key: self.of(value) for key, value in content.items()}
        if type(content) in (list, tuple):
            return type(content)(self.of(value) for value in content)
        return content

    def _of_tensor(self, tensor: Tensor) -> StoredTensor:
        storage: Any = tensor.untyped_storage()
        first, width = storage._checkpoint_offset, tensor.dtype.itemsize
        byte = first + int(tensor.storage_offset()) * width
        span = width * (1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)))
        # On the meta device torch does not check where a tensor ends.
        if tensor.numel() and not first <= byte <= self._records.get(first, (0, 0))[0] - span:
            raise DamagedCheckpoint(f"{self._path} lists tensors beyond its end")
        if tensor.numel() * width > MOST_EXPANDED + max(end for end, _ in self._records.values()):
            raise DamagedCheckpoint(f"{self._path} expands a few numbers to a tensor of {tuple(tensor.shape)}")
        byte += self._start
        stride = None if tensor.is_contiguous() else tensor.stride()
        return StoredTensor(self._path, byte, tensor.dtype, tuple(tensor.shape), stride, self._sums.get(first))
