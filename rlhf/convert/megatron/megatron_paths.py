"""Finds the folder of a model below the folder that a user names, as verl and Megatron-LM lay it out."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from rlhf.models.hf.source import Origin

LATEST = "latest_checkpointed_iteration.txt"


def find_folder(origin: Origin, is_one: Callable[[Path], bool]) -> Path | None:
    """Return the first folder that `is_one` accepts, or None. With a tag, only the folder of this name may be returned.
    Otherwise try the folder itself, `model` and `dist_ckpt` in it (verl), the role's folder and the same two in that
    folder, and the newest iteration (Megatron-LM)."""
    return next((folder for folder in _candidates(origin) if folder.is_dir() and is_one(folder)), None)


def step_of(folder: Path) -> int | None:
    """Return the step in the name of a folder or of a parent (`iter_0000020`, `global_step_20`)."""
    for name in (folder.name, *(parent.name for parent in folder.parents)):
        if (found := re.fullmatch(r"(?:iter_|global_step_)(\d+)", name)) is not None:
            return int(found[1])
    return None


def _candidates(origin: Origin) -> Iterator[Path]:
    path = origin.path
    if origin.tag is not None:
        yield path / origin.tag
        return
    yield path
    for below in (path, path / origin.role):
        yield below
        yield below / "model"
        yield below / "dist_ckpt"
    if (path / LATEST).is_file():
        newest = (path / LATEST).read_text(errors="replace").strip()
        if re.fullmatch(r"\d+|release", newest):
            yield path / (f"iter_{int(newest):07d}" if newest != "release" else newest)
