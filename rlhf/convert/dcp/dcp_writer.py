"""Writes tensors in the format of torch.distributed.checkpoint, from one process without a process group."""

import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from rlhf.convert.dcp.dcp_files import METADATA
from rlhf.convert.torch_file import torch_save_range
from rlhf.models.hf.hf_plan import Progress
from rlhf.models.hf.source import TensorInfo, TensorSource
from rlhf.storage.files import WrittenFile, write_file
from rlhf.storage.hf_layout import SHARD_BYTES

CHUNK_BYTES = 256 << 20
"""Maximum bytes of a chunk with several rows; limited because a loading rank reads whole chunks into memory."""
VERSION = "1.0.0"
OBJECTS = "__1_0.distcp"


class _RowChunk(NamedTuple):
    name: str
    row: int
    shape: tuple[int, ...]
    start: int
    """First element of the chunk in the whole tensor."""


def write_dcp(
    root: Path,
    source: TensorSource,
    *,
    paths: Mapping[str, tuple[str, ...]] | None = None,
    objects: Mapping[str, bytes] | None = None,
    progress: Progress = lambda count: None,
) -> list[WrittenFile]:
    """Write the tensors of `source` into the folder `root`: data files `__0_N.distcp`, then `.metadata`.

    Chunks are rows of the first dimension, so that a loader reads its part without the whole tensor. `paths` has the
    keys of each tensor in the nested state dict (default: all at the top level). `objects` has the other entries by
    name, as bytes of `torch.save`. torch's own writer would keep every tensor of a file in memory until the file is
    complete.
    """
    stored: dict[MetadataIndex, _StorageInfo] = {}
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    files: list[list[_RowChunk]] = [[]]
    filled = 0
    for name, info in source.contents.tensors.items():
        chunks = list(_chunks(name, info))
        listed = [ChunkStorageMetadata(torch.Size(_offsets(chunk)), torch.Size(chunk.shape)) for chunk in chunks]
        entries[name] = TensorStorageMetadata(TensorProperties(info.dtype), torch.Size(info.shape), listed)
        for chunk in chunks:
            nbytes = TensorInfo(chunk.shape, info.dtype).nbytes
            if filled and filled + nbytes > SHARD_BYTES:
                files.append([])
                filled = 0
            files[-1].append(chunk)
            filled += nbytes
    written = []
    for number, chunks in enumerate(files):
        file = f"__0_{number}.distcp"
        written.append(write_file(root, file, _items(source, file, chunks, stored, progress)))
    if objects:
        written.append(write_file(root, OBJECTS, objects.values()))
        at = 0
        for name, content in objects.items():
            entries[name], stored[MetadataIndex(name)] = BytesStorageMetadata(), _StorageInfo(OBJECTS, at, len(content))
            at += len(content)
    described = pickle.dumps(Metadata(entries, paths or {name: (name,) for name in entries}, stored, version=VERSION))
    return [*written, write_file(root, METADATA, [described])]


def _chunks(name: str, info: TensorInfo) -> Iterator[_RowChunk]:
    if not info.shape or not info.numel:
        yield _RowChunk(name, 0, info.shape, 0)
        return
    rows, *rest = info.shape
    row = TensorInfo(tuple(rest), info.dtype)
    step = max(1, CHUNK_BYTES // row.nbytes)
    for first in range(0, rows, step):
        yield _RowChunk(name, first, (min(step, rows - first), *rest), first * row.numel)


def _offsets(chunk: _RowChunk) -> tuple[int, ...]:
    return (chunk.row, *[0] * (len(chunk.shape) - 1)) if chunk.shape else ()


def _items(
    source: TensorSource,
    file: str,
    chunks: list[_RowChunk],
    stored: dict[MetadataIndex, _StorageInfo],
    progress: Progress,
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a data file; store the position of each chunk in `stored`."""
    end = 0
    for chunk in chunks:
        start = end
        for part in torch_save_range(source, chunk.name, chunk.start, chunk.shape):
            end += len(part)
            yield part
            if isinstance(part, memoryview):  # tensor bytes
                progress(len(part))
        stored[MetadataIndex(chunk.name, _offsets(chunk))] = _StorageInfo(file, start, end - start)
