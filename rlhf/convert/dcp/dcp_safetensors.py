"""Reads safetensors folders in which ranks saved parts of tensors with torch's HuggingFaceStorageWriter."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf.convert.bands import Band
from rlhf.convert.dcp.dcp_files import DcpFolder, checked_counts
from rlhf.convert.stored_tensor import StoredTensor
from rlhf.errors import UserError
from rlhf.models.hf.source import TensorInfo
from rlhf.models.model_files import DTYPES
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.reading import UnverifiedFiles, parse_json
from rlhf.storage.safetensors_header import is_shape, read_safetensors_header

SHARDING, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
"""Key in a file's metadata for the offsets of its tensors, and the key of one tensor's offsets."""
FILE = re.compile(r"shard-(\d+)-model-\d+-of-\d+\.safetensors")


def is_sharded(folder: Path) -> bool:
    """Return whether `folder` has files of HuggingFaceStorageWriter's ranks."""
    return any(FILE.fullmatch(path.name) for path in folder.glob("shard-*.safetensors"))


class DcpSafetensors(DcpFolder):
    """Reads the tensors of a HuggingFaceStorageWriter folder, whose files describe their own tensors.

    Raises UserError if the files of a rank are missing or a tensor has an unsupported type, and DamagedCheckpoint for a
    file that is truncated or does not describe its tensors. Missing files of the last ranks cannot be detected here:
    the tensors are then shorter than the model's.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.tensors, self.objects, self.paths = path, {}, [], {}
        self._bands = {}
        self._parts: dict[str, list[tuple[tuple[int, ...], StoredTensor]]] = {}
        names = sorted(file.name for file in path.glob("*.safetensors") if FILE.fullmatch(file.name))
        found = {int(match[1]) for match in map(FILE.fullmatch, names) if match}
        if missing := sorted(set(range(1, max(found) + 1)) - found):
            raise UserError(f"{path} lacks the files shard-{missing[0]:05d}-*.safetensors of one rank. Restore them.")
        files = UnverifiedFiles(path.resolve(), names)
        for name in names:
            self._add(files, name)
        for name, parts in self._parts.items():
            ends = [[begin + size for begin, size in zip(at, part.shape, strict=True)] for at, part in parts]
            info = TensorInfo(tuple(map(max, zip(*ends, strict=True))), parts[0][1].dtype)
            if not is_shape(info.shape) or info.numel > sum(part.numel for _, part in parts):
                raise DamagedCheckpoint(f"{path} lacks parts of {name}, whose shape is {info.shape}")
            self.tensors[name] = info

    def _add(self, files: UnverifiedFiles, name: str) -> None:
        header, length = read_safetensors_header(files, name)
        metadata = parse_json(files.start(name, length)[8:], name).get("__metadata__")
        sharding = metadata.get(SHARDING) if isinstance(metadata, dict) else None
        described: Any = parse_json(sharding.encode(), name) if isinstance(sharding, str) else None
        for tensor, entry in header.items():
            if entry["dtype"] not in DTYPES:
                raise UserError(
                    f"{self.path / name} has tensors of type {entry['dtype']}. Save them as one of {', '.join(DTYPES)}."
                )
            begin, end = entry["data_offsets"]
            if length + end > files.size(name):
                raise DamagedCheckpoint(f"{self.path / name} is truncated: it ends before {tensor}")
            stored = StoredTensor(self.path / name, length + begin, DTYPES[entry["dtype"]], tuple(entry["shape"]))
            if end - begin != stored.numel * stored.dtype.itemsize:
                raise DamagedCheckpoint(f"{self.path / name}: the size of {tensor} does not fit its shape")
            try:
                offsets = checked_counts(described[tensor][OFFSETS])
            except (KeyError, TypeError, ValueError):
                raise DamagedCheckpoint(f"{self.path / name} does not list the offsets of {tensor}") from None
            if len(offsets) != len(stored.shape):
                raise DamagedCheckpoint(
                    f"{self.path / name}: the offsets {offsets} of {tensor} do not fit its shape {stored.shape}"
                )
            self._parts.setdefault(tensor, []).append((offsets, stored))

    def _bands_of(self, name: str) -> Iterator[Band]:
        for offsets, stored in self._parts[name]:
            yield from self._bands_of_chunk(name, offsets, stored.shape, stored)
