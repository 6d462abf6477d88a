"""Creates headers of safetensors files, and validates headers before use. Imports no torch."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.index_rows import Tensors
from rlhf.storage.reading import CheckedFiles, parse_json

ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
"""safetensors' name of a type -> bytes of an element."""
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
"""safetensors' name of a type -> torch's name."""
FLOATS = {kind for kind, name in TORCH_NAMES.items() if "float" in name}
MOST_BYTES = 1 << 60
"""Upper limit of a tensor's elements and of the bytes of all tensors in an index. No checkpoint reaches the limit, and
int64 can hold sums up to it."""
LARGEST = 100_000_000
"""Bytes of the largest header, as in the safetensors library."""


def is_shape(sizes: Sequence[object]) -> bool:
    """Return whether a tensor can have this shape. A size of 0 does not make the other sizes valid."""
    counts = [size for size in sizes if type(size) is int and size >= 0]
    return len(counts) == len(sizes) and math.prod(size for size in counts if size) <= MOST_BYTES


def nbytes_of(kind: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of a tensor; `kind` is safetensors' name of its type."""
    return ITEM_BYTES[kind] * math.prod(shape)


def make_safetensors_header(tensors: Tensors, metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the header of a file in which `tensors` follow in order, without gaps."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + nbytes_of(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_safetensors_header(files: CheckedFiles, name: str) -> tuple[dict[str, Any], int]:
    """Return the header's entries by tensor, and the position of the data. Raise DamagedCheckpoint if invalid."""
    length = 8 + int.from_bytes(files.start(name, 8), "little")
    if length - 8 > LARGEST:
        raise DamagedCheckpoint(f"{name}: its header claims {length - 8} bytes; at most {LARGEST} are valid")
    header = parse_json(files.start(name, length)[8:], name)
    if not isinstance(header, dict):
        raise DamagedCheckpoint(f"{name}: is not a safetensors file")
    header.pop("__metadata__", None)
    for tensor, entry in header.items():
        if not _describes_tensor(entry):
            raise DamagedCheckpoint(f"{name}: has no valid type and shape for {tensor!r}")
        offsets = entry.get("data_offsets")
        if not _is_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise DamagedCheckpoint(f"{name}: has no valid offsets for {tensor!r}")
    return header, length


def _describes_tensor(entry: Any) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return False
    return isinstance(entry.get("shape"), list) and is_shape(entry["shape"])


def _is_counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
