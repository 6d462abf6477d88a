"""Shapes of a model's weights before it is loaded, from the headers of its files, and their count. Imports no torch."""

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_LONGEST_HEADER = 64 << 20


def count_parameters(path: str, revision: str | None = None) -> int | None:
    """The parameters of the model in the folder `path`, or of the Hub's model of that name where it lies in the cache;
    None where its files do not say, as those of no safetensors do not."""
    folder = model_folder(path, revision)
    shapes = {} if folder is None else tensor_shapes(folder)
    return sum(map(math.prod, shapes.values())) or None


def model_folder(path: str, revision: str | None = None) -> Path | None:
    """The folder `path`, or that of the Hub's model of this name in the cache; None where it is not there."""
    folder = Path(path).expanduser()
    return folder if folder.is_dir() else _in_cache(path, revision or "main")


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor in the safetensors files of `folder`, by its name there; empty where there are none, and
    where one cannot be read."""
    try:
        return {name: shape for file in sorted(folder.glob("model*.safetensors")) for name, shape in _header(file)}
    # Reading them tells what is wrong with them.
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}


def _header(file: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > _LONGEST_HEADER:
            raise ValueError("a header too long to be one")
        header: dict[str, Any] = json.loads(stream.read(length))
    for name, tensor in header.items():
        if name != "__metadata__":
            yield name, tuple(map(int, tensor["shape"]))


def _in_cache(name: str, revision: str) -> Path | None:
    """The folder of a downloaded model, without the library for it, whose import takes longer than all of this."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home, "hub")).expanduser()
    repository = cache / f"models--{name.replace('/', '--')}"
    reference = repository / "refs" / revision
    commit = reference.read_text().strip() if reference.is_file() else revision
    snapshot = repository / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None


def in_words(count: int) -> str:
    """A number of parameters as people say it: 271K, 494M, 7.62B."""
    unit, size = next((each for each in (("B", 1e9), ("M", 1e6)) if count >= each[1]), ("K", 1e3))
    return f"{count / size:.3g}{unit}"
