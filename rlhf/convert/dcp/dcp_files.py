"""Reads tensors of a torch.distributed.checkpoint folder: finds them in `.metadata`, reads ranges of the data files."""

import io
import operator
import pickle
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata

from rlhf.convert.bands import Band, StoredPart, bands_of, read_bands, runs_of
from rlhf.convert.pickles import StandIn, stand_in
from rlhf.convert.stored_tensor import StoredTensor, open_torch_file
from rlhf.errors import UserError
from rlhf.models.hf.source import TensorInfo
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.reading import read_regular
from rlhf.storage.safetensors_header import is_shape

METADATA = ".metadata"
LARGEST = 4 << 30
"""Maximum size in bytes of a `.metadata` file; a million chunks take 140 MB."""
METADATA_CLASSES = [
    *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
    *("TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
]
ALLOWED: dict[str, Any] = {
    **{f"torch.distributed.checkpoint.metadata.{name}": getattr(metadata, name) for name in METADATA_CLASSES},
    "torch.distributed.checkpoint.filesystem._StorageInfo": filesystem._StorageInfo,
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties": metadata.TensorProperties,
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING": metadata._MEM_FORMAT_ENCODING,
    # Up to release 0.15, megatron-core's class of `.metadata`, which adds the shapes of flattened tensors.
    "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata": metadata.Metadata,
    "torch.Size": torch.Size,
    "torch.serialization._get_layout": torch.serialization._get_layout,
    "collections.OrderedDict": OrderedDict,
}
"""Classes that the pickle in `.metadata` may use, besides torch's dtypes (such as `torch.float32`)."""
UNREAD = (
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",
    "torch.distributed.checkpoint.planner.SavePlan",
    "torch.distributed.checkpoint.planner.WriteItem",
    "torch.distributed.checkpoint.planner.WriteItemType",
    "torch.distributed.checkpoint.planner.TensorWriteData",
    "megatron.core.dist_checkpointing.strategies.torch.MCoreSavePlan",
)
"""Classes of objects that some savers add; a StandIn replaces each object."""
STAND_INS: dict[str, type[StandIn]] = {name: stand_in(name)[0] for name in UNREAD}


@dataclass
class _Chunk:
    """One item of a data file, opened at its first read."""

    path: Path
    start: int
    size: int
    info: TensorInfo
    _tensor: StoredTensor | None = field(default=None, init=False)

    def read(self, start: int, stop: int) -> Tensor:
        if self._tensor is None:
            found = open_torch_file(self.path, start=self.start, size=self.size)
            if not isinstance(found, StoredTensor) or (found.shape, found.dtype) != (self.info.shape, self.info.dtype):
                raise DamagedCheckpoint(f"{self.path} lacks the tensor that {METADATA} lists at byte {self.start}")
            self._tensor = found
        return self._tensor.read(start, stop)


class DcpFolder:
    """Reads the tensors of a folder by their names in `.metadata`; no file is open between reads.

    `objects` lists the entries that are not tensors. `paths` maps each entry to its keys in the nested state dict, if
    `.metadata` has the keys. Raises UserError for a folder without `.metadata`, and for a missing or compressed data
    file. Raises DamagedCheckpoint for a damaged `.metadata` or a truncated data file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        described = read_metadata(path / METADATA)
        self.tensors: dict[str, TensorInfo] = {}
        self.objects: list[str] = []
        self._items: dict[str, dict[tuple[int, ...], Any]] = {}
        self._chunks: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
        self._bands: dict[str, tuple[TensorInfo, list[Band]]] = {}
        try:
            self._parse_metadata(described)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise DamagedCheckpoint(f"{path / METADATA} does not have torch's structure: {error!r}") from None

    def _parse_metadata(self, described: metadata.Metadata) -> None:
        self.paths: dict[str, tuple[Any, ...]] = {key: tuple(of) for key, of in (described.planner_data or {}).items()}
        for name, entry in described.state_dict_metadata.items():
            if isinstance(entry, metadata.TensorStorageMetadata):
                shape = checked_counts(entry.size)
                if not is_shape(shape):
                    raise ValueError(f"{name} has the shape {shape}")
                self.tensors[name] = TensorInfo(shape, torch.empty(0, dtype=entry.properties.dtype).dtype)
                self._chunks[name] = [
                    (checked_counts(chunk.offsets), checked_counts(chunk.sizes)) for chunk in entry.chunks
                ]
            else:
                self.objects.append(name)
        for index, info in described.storage_data.items():
            self._items.setdefault(index.fqn, {})[checked_counts(index.offset or ())] = info
        self._check_files(described.storage_data)
        for name, info in self.tensors.items():
            stored = sum(item.length for item in self._items.get(name, {}).values())
            if info.nbytes > stored:
                raise ValueError(f"{name} has the shape {info.shape}, but only {stored} bytes")

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of the flattened (row-major) tensor `name`, 1-D."""
        if name not in self._bands:
            self._bands[name] = runs_of(list(self._bands_of(name)), self.tensors[name])
        info, bands = self._bands[name]
        if (found := read_bands(bands, info, start, stop)) is None:
            raise DamagedCheckpoint(f"{self.path / METADATA} does not list all parts of {name}")
        return found

    def read_object(self, name: str) -> Any:
        """Load one of `objects`; raises UserError unless the object has plain values only."""
        if len(found := self._items.get(name, {})) != 1:
            raise DamagedCheckpoint(f"{self.path / METADATA} does not list {name}")
        [item] = found.values()
        return open_torch_file(self.path / item.relative_path, start=item.offset, size=item.length)

    def _bands_of(self, name: str) -> Iterator[Band]:
        info, items = self.tensors[name], self._items.get(name, {})
        for offsets, sizes in self._chunks[name]:
            part, item = TensorInfo(sizes, info.dtype), items.get(offsets)
            if item is None or part.nbytes > item.length:
                raise DamagedCheckpoint(f"{self.path / METADATA} lists too few bytes for a part of {name}")
            stored = _Chunk(self.path / item.relative_path, item.offset, item.length, part)
            yield from self._bands_of_chunk(name, offsets, part.shape, stored)

    def _bands_of_chunk(
        self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...], stored: StoredPart
    ) -> Iterator[Band]:
        """Return the bands of one chunk; raises DamagedCheckpoint unless the chunk is a part of the tensor."""
        shape = self.tensors[name].shape
        fits = len(offsets) == len(sizes) == len(shape)
        if not fits or any(at + size > whole for at, size, whole in zip(offsets, sizes, shape, strict=True)):
            raise DamagedCheckpoint(f"{self.path}: a part of {name}, {sizes} at {offsets}, is outside of {shape}")
        return bands_of(shape, offsets, sizes, stored)

    def _check_files(self, stored: Mapping[Any, Any]) -> None:
        ends: dict[str, int] = {}
        for info in stored.values():
            if getattr(info, "transform_descriptors", None):
                raise UserError(f"{self.path} is compressed ({info.transform_descriptors}). Save it uncompressed.")
            end = sum(checked_counts((info.offset, info.length)))
            ends[info.relative_path] = max(end, ends.get(info.relative_path, 0))
        for file, end in sorted(ends.items()):
            if Path(file).name != file:
                raise DamagedCheckpoint(f"{self.path / METADATA} lists a file outside the folder: {file}")
            if not (self.path / file).is_file():
                raise UserError(f"{self.path} lacks {file}, which {METADATA} lists. Restore it.")
            if (size := (self.path / file).stat().st_size) < end:
                raise DamagedCheckpoint(f"{self.path / file} is truncated: it has {size} bytes instead of {end}")


def checked_counts(numbers: Any) -> tuple[int, ...]:
    """Return a shape or offsets from a file as a tuple of ints; raises ValueError for a negative number."""
    found = tuple(map(operator.index, numbers))
    if any(number < 0 for number in found):
        raise ValueError(f"{found} has a negative number")
    return found


def read_metadata(path: Path) -> metadata.Metadata:
    """Load a `.metadata` file. Raises UserError for a missing file or a class that is not allowed, and
    DamagedCheckpoint for any other content that is not metadata."""
    try:
        content = read_regular(path, LARGEST)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}). Give the folder of a finished save.") from None
    try:
        found = _RestrictedUnpickler(io.BytesIO(content), path).load()
    except UserError:
        raise
    except Exception as error:  # the unpickler can raise anything for other kinds of files
        raise DamagedCheckpoint(f"{path} is truncated, or not metadata of a torch checkpoint: {error}") from None
    if not isinstance(found, metadata.Metadata) or not isinstance(found.storage_data, dict):
        raise DamagedCheckpoint(f"{path} is not metadata of a torch checkpoint")
    return found


class _RestrictedUnpickler(pickle._Unpickler):
    """Unpickles the allowed classes, and rejects all others by name.

    Uses Python's unpickler, because the one in C allocates as much memory as a pickle claims to need, and lets a
    pickle set attributes of the allowed classes themselves, for the whole process.
    """

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)
    del dispatch[pickle.BYTEARRAY8[0]]  # this opcode, too, allocates the claimed size

    def __init__(self, file: io.BytesIO, path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if (known := ALLOWED.get(full) or STAND_INS.get(full)) is not None:
            return known
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise UserError(
            f"{self._path} uses {full}, which is not allowed in a checkpoint: loading it could run any code. If you "
            "trust the file, save it again with torch.distributed.checkpoint."
        )

    def _build(self) -> None:
        made = self.stack[-2]  # type: ignore[attr-defined]
        if callable(made) or isinstance(made, Enum):  # the whole process shares this object, unlike an instance
            raise DamagedCheckpoint(f"the pickle sets attributes of {made}")
        self.load_build()  # type: ignore[attr-defined]

    dispatch[pickle.BUILD[0]] = _build
