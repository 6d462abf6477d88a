"""Reads the shapes of weights from file headers, and counts parameters, before the model loads. Imports no torch."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_LONGEST_HEADER = 64 << 20


def count_parameters(path: str, revision: str | None = None) -> int | None:
    """Return the number of parameters of a folder, or of a Hub model in the cache; None without safetensors headers."""
    folder = model_folder(path, revision)
    shapes = {} if folder is None else tensor_shapes(folder)
    return sum(map(math.prod, shapes.values())) or None


def model_folder(path: str, revision: str | None = None) -> Path | None:
    """Return the folder `path`, or the cached folder of the Hub model `path`; None if neither exists."""
    folder = Path(path).expanduser()
    return folder if folder.is_dir() else _in_cache(path, revision or "main")


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes in the safetensors files of `folder` by name; empty without files, or if one is unreadable."""
    try:
        return {name: shape for file in sorted(folder.glob("model*.safetensors")) for name, shape in _header(file)}
    # Ignore damaged files, because the load of the model reports them.
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}


def _header(file: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    if not file.is_file():
        raise ValueError("not a regular file")  # opening a pipe would never end
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > _LONGEST_HEADER:
            raise ValueError("the header is too long")
        header: dict[str, Any] = json.loads(stream.read(length))
    for name, tensor in header.items():
        if name != "__metadata__":
            yield name, tuple(map(int, tensor["shape"]))


def hub_cache(environment: Mapping[str, str]) -> Path:
    """Return the folder of the Hub's cache, by huggingface_hub's own rules."""
    caches = Path(environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME") or "~", ".cache"))
    home = Path(environment.get("HF_HOME") or caches / "huggingface")
    own = environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE")
    return Path(own or home / "hub").expanduser()


def _in_cache(name: str, revision: str) -> Path | None:
    """Return the folder of a downloaded model, without huggingface_hub, whose import is slower than this function."""
    repository = hub_cache(os.environ) / f"models--{name.replace('/', '--')}"
    reference = repository / "refs" / revision
    commit = reference.read_text().strip() if reference.is_file() else revision
    snapshot = repository / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None


def short_number(count: int) -> str:
    """Return a number of parameters in short form: 271K, 494M, 7.62B."""
    unit, size = next((each for each in (("B", 1e9), ("M", 1e6)) if count >= 0.9995 * each[1]), ("K", 1e3))
    return f"{count / size:.3g}{unit}"
