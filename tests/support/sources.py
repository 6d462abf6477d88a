"""Opens checkpoints in tests, and reads all tensors and moments of a source."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from rlhf.convert.layouts import AUTO, open_source
from rlhf.models.hf.source import Origin, TensorSource


@contextmanager
def opened(path: Path, backend: str = AUTO, **origin: Any) -> Iterator[TensorSource]:
    """Open the source that `--backend` would open."""
    source = open_source(Origin(path, **origin), backend)
    try:
        yield source
    finally:
        source.close()


def whole(source: TensorSource, chunk: int | None = None) -> dict[str, Tensor]:
    """Return every tensor and moment, read in ranges of `chunk` elements (None: at once)."""
    found = {}
    for name, info in (source.contents.tensors | source.contents.moments).items():
        step = chunk or max(1, info.numel)
        parts = [
            source.read(name, start, min(start + step, info.numel)) for start in range(0, max(1, info.numel), step)
        ]
        assert all(part.dtype == info.dtype and part.is_contiguous() for part in parts)
        result = parts[0].new_empty(info.numel)
        for number, part in enumerate(parts):
            result[number * step : number * step + len(part)] = part
        found[name] = result.view(info.shape)
    return found
