"""Count of a model's parameters before it is loaded, from the headers of its files. Imports no torch."""

import json
import math
import os
from pathlib import Path
from typing import Any

_LONGEST_HEADER = 64 << 20


def count_parameters(path: str, revision: str | None = None) -> int | None:
    """The parameters of the model in the folder `path`, or of the Hub's model of that name where it lies in the cache;
    None where its files do not say, as those of no safetensors do not."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        found = _in_cache(path, revision or "main")
        if found is None:
            return None
        folder = found
    files = sorted(folder.glob("model*.safetensors"))
    try:
        counts = [_count(file) for file in files]
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # reading them tells what is wrong with them
        return None
    return sum(counts) or None


def _count(file: Path) -> int:
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > _LONGEST_HEADER:
            raise ValueError("a header too long to be one")
        header: dict[str, Any] = json.loads(stream.read(length))
    return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")


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
