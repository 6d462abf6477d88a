"""Form of a manifest: the type and bounds of each field, so that whoever has read one may rely on them."""

import os
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any, TypeGuard

from rlhf.storage.hashing import BLOCK, HASH_DIGITS
from rlhf.storage.layout import MANIFEST

LARGEST_SIZE = (1 << 63) - 1
LONGEST_NAME = 255
"""Bytes between two slashes that a file system takes."""


def problems_of(payload: dict[str, Any]) -> Iterator[str]:
    """Faults of the fields of a manifest of the present format, one line each; the fields are all there."""
    for name in ("backend", "config_hash", "created"):
        if not isinstance(payload[name], str):
            yield f"its {name} is no text"
    for name in ("step", "world_size", "numerics"):
        if not _is_count(payload[name]):
            yield f"its {name} is no number of 0 or more"
    for name in ("contents", "roles"):
        if not _is_list(payload[name], str):
            yield f"its {name} are no list of texts"
    if not _is_list(payload["threads"], int):
        yield "its threads are no list of numbers"
    for name in ("fingerprints", "versions", "linked", "imported"):
        if not _is_mapping(payload[name], str):
            yield f"its {name} are no texts by name"
    if payload["imported"] and not {"layout", "path"} <= payload["imported"].keys():
        yield "its imported does not say from where"
    if not _is_mapping(payload["metrics"], int | float):
        yield "its metrics are not all numbers"
    elif any(isinstance(figure, int) and abs(figure) > LARGEST_SIZE for figure in payload["metrics"].values()):
        yield "its metrics are beyond all figures"
    if not _is_mapping(payload["files"], dict):
        yield "its files are no entries by name"
        return
    for name, entry in payload["files"].items():
        if problem := _name_problem(name) or _entry_problem(entry):
            yield f"it names {name!r}, which {problem}"


def _name_problem(name: str) -> str | None:
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts:
        return "points outside the checkpoint"
    try:
        parts = [os.fsencode(part) for part in pure.parts]
    except UnicodeEncodeError:
        parts = []
    if not parts or str(pure) != name or name == MANIFEST:
        return "is no name of a file"
    return "is no name of a file" if any(b"\0" in part or len(part) > LONGEST_NAME for part in parts) else None


def _entry_problem(entry: dict[str, Any]) -> str | None:
    size, digits = entry.get("size"), entry.get("xxh3_128")
    if not _is_count(size):
        return "has no size"
    if not isinstance(digits, str) or len(digits) != -(-size // BLOCK) * HASH_DIGITS:
        return "has not one hash for each block"
    domains = entry.get("domains", [])
    return None if _is_list(domains, int) else "has no list of storage domains"


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST_SIZE


def _is_list(value: object, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)


def _is_mapping(value: object, kind: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(item, kind) for item in value.values())
