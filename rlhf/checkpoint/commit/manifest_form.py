"""Checks the type and bounds of each field of a manifest."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any, TypeGuard

from rlhf.storage.hashing import BLOCK, HASH_DIGITS
from rlhf.storage.layout import MANIFEST

LARGEST_SIZE = (1 << 63) - 1
LONGEST_NAME = 255
"""Bytes of a path component that a file system accepts."""


def problems_of(payload: dict[str, Any]) -> Iterator[str]:
    """Yield one line for each invalid field of a manifest of the present format. The caller has checked that all fields
    exist."""
    wrong = [message.format(name) for names, fits, message in FORMS for name in names if not fits(payload[name])]
    if wrong:
        yield from wrong
        return
    if payload["imported"] and not {"layout", "path"} <= payload["imported"].keys():
        yield "its field imported lacks the layout or the path"
    if any(isinstance(figure, int) and abs(figure) > LARGEST_SIZE for figure in payload["metrics"].values()):
        yield "its metrics have a number that is too large"
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
        return "is not a valid file name"
    return "is not a valid file name" if any(b"\0" in part or len(part) > LONGEST_NAME for part in parts) else None


def _entry_problem(entry: dict[str, Any]) -> str | None:
    size, digits = entry.get("size"), entry.get("xxh3_128")
    if not _is_count(size):
        return "has no size"
    if not isinstance(digits, str) or len(digits) != -(-size // BLOCK) * HASH_DIGITS:
        return "does not have one hash per block"
    domains = entry.get("domains", [])
    return None if _is_list(domains, int) else "has no list of storage domains"


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST_SIZE


def _is_list(value: object, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)


def _is_mapping(value: object, kind: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(item, kind) for item in value.values())


FORMS: Sequence[tuple[Sequence[str], Callable[[Any], bool], str]] = (
    (("backend", "config_hash", "created"), lambda value: isinstance(value, str), "its field {} is not a string"),
    (("step", "world_size", "numerics"), _is_count, "its field {} is not an integer of 0 or more"),
    (("contents", "roles"), lambda value: _is_list(value, str), "its field {} is not a list of strings"),
    (("threads",), lambda value: _is_list(value, int), "its field {} is not a list of integers"),
    (
        ("fingerprints", "versions", "linked", "imported"),
        lambda value: _is_mapping(value, str),
        "its field {} does not map names to strings",
    ),
    (("metrics",), lambda value: _is_mapping(value, int | float), "its field {} does not map names to numbers"),
    (("files",), lambda value: _is_mapping(value, dict), "its field {} does not map names to entries"),
)
"""Fields, their check, and the message for a field that fails the check."""
