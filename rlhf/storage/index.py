"""Index of tensors in files: which range of which one lies where, down to the byte. Imports no torch."""

from typing import Any, TypeGuard

from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.reading import CheckedFiles, parse_json

INDEX = "index.json"


def read_index(files: CheckedFiles, folder: str) -> dict[str, Any]:
    """By tensor its `dtype`, `shape` and `shards` (each with `file`, `start`, `stop` and `offset`), as `write_shards`
    has described them; raises DamagedCheckpoint for anything else."""
    name = f"{folder}/{INDEX}"
    index = files.document(name)
    if not isinstance(index, dict):
        raise DamagedCheckpoint(f"{name}: is no index of tensors")
    for tensor, entry in index.items():
        shards = entry.get("shards") if _describes_tensor(entry) else None
        if not isinstance(shards, list) or not all(map(_describes_shard, shards)):
            raise DamagedCheckpoint(f"{name}: does not say where {tensor!r} is")
    return index


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


def _describes_shard(shard: Any) -> bool:
    if not isinstance(shard, dict) or not isinstance(shard.get("file"), str):
        return False
    return _is_counts([shard.get(key) for key in ("start", "stop", "offset")]) and shard["start"] <= shard["stop"]


def _is_counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
