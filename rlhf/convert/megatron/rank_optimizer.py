"""Finds the names of Adam's state in a Megatron rank's file, which numbers the parameters.

The numbers follow the order of the parameters in the model, first of one parameter group, then of the next. The file
lists the weights in the same order. Megatron groups the parameters by weight decay; vectors get none.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rlhf.convert.megatron.megatron_model import NO_WEIGHTS
from rlhf.convert.megatron.megatron_optimizer import BUCKETS, MASTERS
from rlhf.convert.moments import MOMENTS, Unmapped
from rlhf.convert.stored_tensor import StoredTensor

SAMPLE = 1 << 16
"""Number of elements of a weight to compare with the optimizer's float32 copy."""
WRONG_ORDER = "the order of the parameters is unknown: {}"

Weights = Sequence[dict[str, StoredTensor]]
"""A rank's weights by name, for each virtual pipeline stage."""
Numbered = list[tuple[int, str, StoredTensor]]
"""Weights of a parameter group in the optimizer's order: virtual pipeline stage, name, tensor."""


def moments_of_rank(state: Any, weights: Weights, path: Path) -> dict[str, list[dict[str, StoredTensor]]]:
    """Return exp_avg, exp_avg_sq and MASTERS in the structure of `weights`, from the optimizer's `state` in `path`.

    MASTERS are the float32 copies of weights in 16 bits. Raises Unmapped unless the order of the parameters follows
    from the groups, all shapes, and the values of the float32 copies.
    """
    if not isinstance(state, dict):
        raise Unmapped(f"{path} has {'several optimizers' if isinstance(state, list) else 'no optimizer'}")
    inner = state.get("optimizer", state)
    entries, groups = inner.get("state"), inner.get("param_groups")
    if not entries and "param_groups" in inner:
        raise Unmapped(BUCKETS.format("distrib_optim.pt"))
    found: dict[str, list[dict[str, StoredTensor]]] = {kind: [{} for _ in weights] for kind in (*MOMENTS, MASTERS)}
    try:
        masters = state.get("fp32_from_fp16_params") or [[] for _ in groups]
        for group, named, copies in zip(groups, _by_group(groups, weights), masters, strict=True):
            numbered = zip(named, group["params"], strict=True)
            states = [(stage, name, weight, entries[number]) for (stage, name, weight), number in numbered]
            for moment in MOMENTS:
                for stage, name, weight, entry in states:
                    found[moment][stage][name] = _checked(entry[moment], name, weight)
            in_16_bits = [each for each in named if each[2].dtype != torch.float32]
            for (stage, name, weight), copy in zip(in_16_bits, copies, strict=True):
                found[MASTERS][stage][name] = _checked_copy(_checked(copy, name, weight), name, weight)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise Unmapped(WRONG_ORDER.format(f"{path} lacks Megatron's Adam state for some weight ({error!r})")) from None
    return found


def _by_group(groups: Any, weights: Weights) -> list[Numbered]:
    named = [(stage, name, part) for stage, parts in enumerate(weights) for name, part in parts.items()]
    named = [each for each in named if not NO_WEIGHTS.search(each[1])]
    filled = [group for group in groups if group["params"]]
    if len(filled) == 1:
        return [named if group["params"] else [] for group in groups]
    if sorted(group["wd_mult"] != 0 for group in filled) != [False, True]:
        raise Unmapped(WRONG_ORDER.format(f"{len(filled)} parameter groups"))
    return [[e for e in named if (len(e[2].shape) > 1) == (g["wd_mult"] != 0) and g["params"]] for g in groups]


def _checked(tensor: Any, name: str, weight: StoredTensor) -> StoredTensor:
    if not isinstance(tensor, StoredTensor) or tensor.shape != weight.shape:
        found = list(tensor.shape) if isinstance(tensor, StoredTensor) else "no tensor"
        raise Unmapped(WRONG_ORDER.format(f"{found} in place of {name}, {list(weight.shape)}"))
    return tensor


def _checked_copy(copy: StoredTensor, name: str, weight: StoredTensor) -> StoredTensor:
    sample = min(SAMPLE, weight.numel)
    if not torch.equal(copy.read(0, sample).to(weight.dtype), weight.read(0, sample)):
        raise Unmapped(WRONG_ORDER.format(f"the float32 copy of {name} differs from the weight"))
    return copy
