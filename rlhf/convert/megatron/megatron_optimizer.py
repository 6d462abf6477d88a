"""Checks the optimizer's state of a Megatron checkpoint against the model's weights."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rlhf.convert.megatron.megatron_model import NO_WEIGHTS
from rlhf.convert.moments import MOMENTS, Unmapped, largest_count
from rlhf.convert.stored_tensor import StoredTensor
from rlhf.models.hf.source import ReadableTensor
from rlhf.storage.disk_errors import DamagedCheckpoint

Parts = Mapping[str, Sequence[ReadableTensor]]
"""Tensors by Megatron's names: one part per tensor parallel rank."""
MASTERS = "float32 weights"
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
BUCKETS = (
    "in the format {}, whose buckets have no parameter names. Save with --dist-ckpt-optim-fully-reshardable "
    "(in verl: dist_ckpt_optim_fully_reshardable=True), or start without moments"
)
"""Reason why a distributed optimizer's state is absent."""


@dataclass(frozen=True)
class OptimizerParts:
    """Adam's state. `moments` maps exp_avg and exp_avg_sq to tensors in the weights' shapes. `masters` are the float32
    weights of a model in 16 bits, and empty if the model is in float32. `step` is the number of updates."""

    moments: Mapping[str, Parts]
    step: int
    masters: Parts = field(default_factory=dict)


def check_fits(optimizer: OptimizerParts, weights: Parts) -> None:
    """Raise Unmapped unless the optimizer has one tensor of the same shape for each weight, and no other tensor."""
    names = {name for name in weights if not NO_WEIGHTS.search(name)}
    in_16_bits = {name for name in names if weights[name][0].info.dtype != torch.float32}
    expected = dict.fromkeys(MOMENTS, names) | ({MASTERS: in_16_bits} if optimizer.masters else {})
    for kind, needed in expected.items():
        found = optimizer.masters if kind == MASTERS else optimizer.moments.get(kind, {})
        if missing := sorted(needed - found.keys()):
            raise Unmapped(f"the optimizer has no {kind} of {missing[0]} ({len(missing)} in all)")
        if unknown := sorted(found.keys() - names):
            raise Unmapped(f"the optimizer has {kind} of {unknown[0]}, which the model lacks")
        for name, parts in found.items():
            _check_parts(kind, name, parts, weights[name])


def _check_parts(kind: str, name: str, parts: Sequence[ReadableTensor], weights: Sequence[ReadableTensor]) -> None:
    shapes, expected = ([list(part.info.shape) for part in tensors] for tensors in (parts, weights))
    if shapes != expected:
        raise Unmapped(f"{kind} of {name} has the shapes {shapes}, the weight has {expected}")
    dtypes = {part.info.dtype for part in parts}
    if len(dtypes) > 1 or not dtypes <= set(FLOATS[:1] if kind == MASTERS else FLOATS):
        raise Unmapped(f"{kind} of {name} has the dtype {' and '.join(sorted(map(str, dtypes)))}")


def updates_in(states: Any, where: Path) -> int:
    """Return the step count that all parameters share. `states` are the optimizer states read from `where`.

    megatron-core writes `common_step`, a `step` per parameter, or a `step` per group, depending on the class of Adam.
    Raises Unmapped for a missing or impossible count, and for different counts.
    """
    counts = set(_counts(states))
    if len(counts) != 1:
        found = f"the step counts {', '.join(map(str, sorted(counts)[:3]))}" if counts else "no step count"
        raise Unmapped(f"the optimizer in {where} has {found}")
    try:
        return largest_count(counts)
    except DamagedCheckpoint:
        raise Unmapped(f"the optimizer in {where} has the impossible step count {counts.pop():g}") from None


def _counts(state: Any) -> Iterator[float]:
    if isinstance(state, dict):
        for key, value in state.items():
            if key not in ("step", "common_step"):
                yield from _counts(value)
            elif isinstance(value, StoredTensor) and value.numel == 1:
                yield float(value.read(0, 1))
            elif isinstance(value, int | float):
                yield float(value)
    elif isinstance(state, list):
        for each in state:
            yield from _counts(each)
