"""Files as `torch.save` writes them, written tensor by tensor: none is in memory as a whole."""

import io
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import skip_data

from rlhf.checkpoint.interop.source import TensorInfo, TensorSource
from rlhf.storage.files import WrittenFile, write_file
from rlhf.storage.shards import as_bytes

SLAB_BYTES = 64 << 20


def write_torch_file(root: Path, path: str, source: TensorSource, content: Mapping[str, Any], key: str) -> WrittenFile:
    """Write `root/path`, which `torch.load` reads as `content` with all tensors of `source`, by name, under `key`.

    The checksums of the zip file's records stay empty, which torch allows and `unzip -t` reports.
    """
    tensors = source.contents.tensors
    with FakeTensorMode():
        named = {name: torch.empty(info.shape, dtype=info.dtype) for name, info in tensors.items()}
    frame = _Frame()
    with skip_data(materialize_fake_tensors=True):
        torch.save({**content, key: named}, frame)  # type: ignore[arg-type]  # a file, as far as torch uses one
    gaps = [name for name, info in tensors.items() if info.numel]
    return write_file(root, path, _filled(frame, source, gaps))


def slabs(source: TensorSource, name: str) -> Iterator[memoryview]:
    """The bytes of a tensor, in pieces that fit into memory."""
    info: TensorInfo = source.contents.tensors[name]
    step = SLAB_BYTES // info.dtype.itemsize
    for start in range(0, info.numel, step):
        yield as_bytes(source.read(name, start, min(info.numel, start + step)))


def _filled(frame: "_Frame", source: TensorSource, gaps: list[str]) -> Iterator[bytes | memoryview]:
    """The file of which `frame` has all but the tensors, which are `gaps` in their order."""
    names = iter(gaps)
    for part in frame.parts:
        if isinstance(part, bytes):
            yield part
        else:
            name = next(names)
            if source.contents.tensors[name].nbytes != part:
                raise RuntimeError(f"torch.save leaves {part} bytes for {name}")
            yield from slabs(source, name)


class _Frame(io.RawIOBase):
    """What `torch.save` writes beside the tensors: bytes, and the length of each gap that it leaves for one."""

    def __init__(self) -> None:
        self.parts: list[bytes | int] = []

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        self.parts.append(bytes(content))
        return len(content)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence != os.SEEK_CUR:
            raise io.UnsupportedOperation("torch.save goes back in its file")
        self.parts.append(offset)
        return offset
