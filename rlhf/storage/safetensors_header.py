"""Creates headers of safetensors files, and validates headers before use. Imports no torch."""

import json
import math
from collections.abc import Mapping
from typing import Any, TypeGuard

from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.index_rows import Tensors
from rlhf.storage.reading import CheckedFiles, parse_json
from rlhf.storage.shard_index import ITEM_BYTES

LARGEST = 100_000_000
"""Bytes of the largest header, as in the safetensors library."""


def make_safetensors_header(tensors: Tensors, metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the header of a file in which `tensors` follow in order, without gaps."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + ITEM_BYTES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_safetensors_header(files: CheckedFiles, name: str) -> tuple[dict[str, Any], int]:
    """Return a safetensors file's tensors by name and the position of their data; raise DamagedCheckpoint if
    invalid."""
    length = 8 + int.from_bytes(files.start(name, 8), "little")
    if length - 8 > LARGEST:
        raise DamagedCheckpoint(f"{name}: its header claims {length - 8} bytes; at most {LARGEST} are valid")
    header = parse_json(files.start(name, length)[8:], name)
    if not isinstance(header, dict):
        raise DamagedCheckpoint(f"{name}: is not a safetensors file")
    header.pop("__metadata__", None)
    for tensor, entry in header.items():
        offsets = entry.get("data_offsets") if _describes_tensor(entry) else None
        if not _is_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise DamagedCheckpoint(f"{name}: has no valid offsets of {tensor!r}")
    return header, length


def _describes_tensor(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("dtype"), str) and _is_counts(entry.get("shape"))


def _is_counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
