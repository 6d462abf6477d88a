"""Writes files as `torch.save` does, one range of a tensor at a time."""

import io
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import skip_data

from rlhf.models.hf.hf_plan import Progress
from rlhf.models.hf.source import TensorInfo, TensorSource
from rlhf.storage.files import WrittenFile, write_file
from rlhf.storage.shards import as_bytes

SLAB_BYTES = 64 << 20
"""At most this many bytes of a tensor are in memory at once."""


def write_torch_file(
    root: Path,
    path: str,
    source: TensorSource,
    content: Mapping[str, Any],
    key: str,
    progress: Progress = lambda count: None,
) -> WrittenFile:
    """Write `root/path`, from which `torch.load` returns `content` with all tensors of `source`, by name, under `key`.
    The zip records have no checksums: torch accepts such files, but `unzip -t` reports an error."""
    tensors = source.contents.tensors
    with FakeTensorMode():
        named = {name: torch.empty(info.shape, dtype=info.dtype) for name, info in tensors.items()}
    return write_file(root, path, torch_save_bytes({**content, key: named}, _all_slabs(source, progress)))


def torch_save_range(
    source: TensorSource, name: str, start: int, shape: tuple[int, ...]
) -> Iterator[bytes | memoryview]:
    """Yield the bytes that `torch.save` writes for one tensor of `shape`: the elements of `name` from `start` on."""
    info = TensorInfo(shape, source.contents.tensors[name].dtype)
    with FakeTensorMode():
        tensor = torch.empty(shape, dtype=info.dtype)
    return torch_save_bytes(tensor, slabs(source, name, start, start + info.numel))


def slabs(source: TensorSource, name: str, start: int, stop: int) -> Iterator[memoryview]:
    """Yield the bytes of elements [start, stop) of a tensor, in ranges of at most SLAB_BYTES."""
    step = SLAB_BYTES // source.contents.tensors[name].dtype.itemsize
    for first in range(start, stop, step):
        yield as_bytes(source.read(name, first, min(stop, first + step)))


def _all_slabs(source: TensorSource, progress: Progress) -> Iterator[memoryview]:
    for name, info in source.contents.tensors.items():
        for slab in slabs(source, name, 0, info.numel):
            yield slab
            progress(len(slab))


def torch_save_bytes(content: Any, tensors: Iterator[memoryview]) -> Iterator[bytes | memoryview]:
    """Yield the bytes that `torch.save` writes for `content`; `tensors` yields the bytes of its tensors, in order."""
    frame = _Frame()
    with skip_data(materialize_fake_tensors=True):
        torch.save(content, frame)  # type: ignore[arg-type]  # torch uses only the methods of _Frame
    for part in frame.parts:
        if isinstance(part, bytes):
            yield part
            continue
        while part:
            slab = next(tensors)
            if len(slab) > part:
                raise RuntimeError("torch.save leaves a gap whose size differs from the tensor's")
            part -= len(slab)
            yield slab


class _Frame(io.RawIOBase):
    """Records the bytes that `torch.save` writes around tensors, and the length of the gap for each tensor."""

    def __init__(self) -> None:
        self.parts: list[bytes | int] = []

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        self.parts.append(bytes(content))
        return len(content)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence != os.SEEK_CUR:
            raise io.UnsupportedOperation("torch.save seeks backwards")
        self.parts.append(offset)
        return offset
