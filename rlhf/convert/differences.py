"""Compares two open checkpoints: settings and state value by value, tensors bit by bit."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf.checkpoint.export.layout_native import NativeCheckpoint
from rlhf.config.stored import stored_sections
from rlhf.models.hf.small_files import parse_model_config, read_small_files
from rlhf.models.hf.source import TensorInfo, TensorSource
from rlhf.storage.hf_layout import MODEL_CONFIG
from rlhf.storage.layout import CONFIG, DRIVER_STATE

RANGE_BYTES = 16 << 20
"""Compare at most this many bytes of a tensor at once."""
ABSENT = "(none)"
"""Stands for a value that one of the two checkpoints lacks."""


@dataclass(frozen=True)
class ValueDifference:
    """A setting or state value that differs. `key` is the dotted name; a missing value is `ABSENT`."""

    key: str
    a: Any
    b: Any


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that differs, or that only one checkpoint has.

    Norms and `largest` are None unless both tensors exist and have the same shape.
    """

    name: str
    what: str
    """One of `only in A`, `only in B`, `shape`, `dtype`, `values`."""
    a: str
    b: str
    """Dtype and shape of the tensor in A and in B."""
    norm_a: float | None = None
    norm_b: float | None = None
    largest: float | None = None
    """Largest absolute difference; NaN if either tensor has a NaN."""


@dataclass(frozen=True)
class Compared:
    """Result of a comparison: the number of tensors in A or B, and the tensors that differ."""

    tensors: int
    different: list[TensorDifference]


def documents(roles: Mapping[str, TensorSource]) -> dict[str, dict[str, Any]]:
    """Return a checkpoint's settings and state, {kind, such as `config`: {dotted name: value}}."""
    found: dict[str, dict[str, Any]] = {}
    first = next(iter(roles.values()))
    if isinstance(first, NativeCheckpoint):
        if CONFIG in first.manifest.files:
            found["config"] = _flat(stored_sections(first.files.content(CONFIG), first.manifest.release))
        found["driver state"] = _flat(first.files.document(DRIVER_STATE))
    for role, source in roles.items():
        trained, files = source.contents.progress, source.contents.model_files
        progress = _flat(vars(trained) | {"schedule": trained.schedule or {}})
        found[f"{role}'s progress"] = {key: value for key, value in progress.items() if value is not None}
        if files is not None and (files / MODEL_CONFIG).is_file():
            found[f"{role}'s {MODEL_CONFIG}"] = _flat(parse_model_config(read_small_files(files), files))
    return found


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping) or not value:
        return {prefix: value}
    inner = (_flat(item, f"{prefix}.{key}" if prefix else str(key)) for key, item in value.items())
    return {key: item for part in inner for key, item in part.items()}


def value_differences(a: Mapping[str, Any] | None, b: Mapping[str, Any] | None) -> list[ValueDifference]:
    """Return the values that differ between two documents, or one difference if only one document exists."""
    if a is None or b is None:
        sizes = [ABSENT if document is None else f"{len(document)} values" for document in (a, b)]
        return [ValueDifference("whole document", *sizes)]
    pairs = ((key, a.get(key, ABSENT), b.get(key, ABSENT)) for key in sorted(a.keys() | b.keys()))
    return [ValueDifference(key, left, right) for key, left, right in pairs if left != right]


def compare_tensors(
    a: TensorSource | None,
    b: TensorSource | None,
    tables: tuple[Mapping[str, TensorInfo], Mapping[str, TensorInfo]],
    progress: Callable[[int], None] = lambda count: None,
) -> Compared:
    """Compare the tensors of `a` and `b` that `tables` list by name. Call `progress` with each tensor's size in `a`."""
    of_a, of_b = tables
    different = []
    for name, info in of_a.items():
        if name not in of_b:
            different.append(TensorDifference(name, "only in A", _form(info), ""))
        elif a is not None and b is not None and (found := _compare(a, b, name, info, of_b[name])) is not None:
            different.append(found)
        progress(info.nbytes)
    different += [TensorDifference(name, "only in B", "", _form(of_b[name])) for name in of_b if name not in of_a]
    return Compared(len(of_a.keys() | of_b.keys()), different)


def _compare(
    a: TensorSource, b: TensorSource, name: str, info: TensorInfo, other: TensorInfo
) -> TensorDifference | None:
    forms = _form(info), _form(other)
    if info.shape != other.shape:
        return TensorDifference(name, "shape", *forms)
    pieces = list(_ranges(info, other))
    if info.dtype == other.dtype and all(_equal_bits(a.read(name, *piece), b.read(name, *piece)) for piece in pieces):
        return None
    squares_a = squares_b = largest = 0.0
    for piece in pieces:
        left, right = a.read(name, *piece).double(), b.read(name, *piece).double()
        squares_a, squares_b = squares_a + float(left.square().sum()), squares_b + float(right.square().sum())
        # Infinities of the same sign are equal. NaN differs from everything.
        found = float(torch.where(left == right, 0.0, (left - right).abs()).max())
        largest = found if math.isnan(found) or found > largest else largest
    what = "dtype" if info.dtype != other.dtype else "values"
    return TensorDifference(name, what, *forms, math.sqrt(squares_a), math.sqrt(squares_b), largest)


def _ranges(info: TensorInfo, other: TensorInfo) -> Iterator[tuple[int, int]]:
    step = RANGE_BYTES // max(info.dtype.itemsize, other.dtype.itemsize)
    yield from ((start, min(start + step, info.numel)) for start in range(0, info.numel, step))


def _equal_bits(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def _form(info: TensorInfo) -> str:
    return f"{str(info.dtype).removeprefix('torch.')} {list(info.shape)}"
