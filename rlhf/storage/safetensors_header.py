"""Header of a safetensors file, checked before anything is made of it. Imports no torch."""

from typing import Any, TypeGuard

from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.reading import CheckedFiles, parse_json


def read_safetensors_header(files: CheckedFiles, name: str) -> tuple[dict[str, Any], int]:
    """The tensors of a safetensors file by name (`dtype`, `shape`, `data_offsets`), and where in it their data begins.

    Raises DamagedCheckpoint when it begins with something else.
    """
    length = 8 + int.from_bytes(files.start(name, 8), "little")
    header = parse_json(files.start(name, length)[8:], name)
    if not isinstance(header, dict):
        raise DamagedCheckpoint(f"{name}: is no safetensors file")
    header.pop("__metadata__", None)
    for tensor, entry in header.items():
        offsets = entry.get("data_offsets") if _describes_tensor(entry) else None
        if not _is_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise DamagedCheckpoint(f"{name}: does not say where {tensor!r} is")
    return header, length


def _describes_tensor(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("dtype"), str) and _is_counts(entry.get("shape"))


def _is_counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
