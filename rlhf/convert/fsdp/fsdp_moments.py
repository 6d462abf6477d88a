"""Maps the moments in the optimizer files of verl's FSDP ranks to parameter names.

FSDP2's files have one entry per parameter. FSDP1 concatenates the parameters of each wrapped unit. FSDP1's
files have one entry per unit: the rank's piece of the unit. With `use_orig_params`, FSDP1's files have one entry per
parameter: the rank's piece of the parameter.
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf.convert.fsdp.fsdp_files import ALLOWED, OPTIMIZER, missing_among, paths_of
from rlhf.convert.fsdp.fsdp_tensors import assemble
from rlhf.convert.moments import MOMENTS, Unmapped
from rlhf.convert.stored_tensor import StoredWrapper, as_pieces, join_pieces, numel_of, open_mapping
from rlhf.models.hf.source import ReadableTensor, cut
from rlhf.storage.disk_errors import DamagedCheckpoint

BLOCK = re.compile(r"(?:.*?\.)?\d+\.")
"""Name prefix of the parameters in a repeated block, such as a decoder layer, which FSDP1 wraps as a unit."""


def read_moments(
    folder: Path, world_size: int, parameters: Mapping[str, tuple[int, ...]], shard_ranks: Sequence[int]
) -> dict[str, ReadableTensor]:
    """Return the optimizer's `NAME.exp_avg`, `NAME.exp_avg_sq` and `NAME.step` for each updated parameter NAME.

    `parameters` maps names to shapes, in the model's order. `shard_ranks` are the ranks whose pieces, in this order,
    form one copy of the model. Raises Unmapped when the optimizer is missing or does not fit the parameters;
    DamagedCheckpoint for files of different steps.
    """
    paths = paths_of(folder, OPTIMIZER, world_size)
    if missing := missing_among(paths):
        raise Unmapped(f"{missing} missing")
    states = [open_mapping(path, ALLOWED, "verl") for path in paths]
    groups = states[0].get("param_groups")
    if not isinstance(groups, list) or len(groups) != 1 or not all(isinstance(s.get("state"), dict) for s in states):
        raise Unmapped("the optimizer does not have one group of parameters")
    entries = [state["state"] for state in states]
    for entry in entries[0].values():
        if not {*MOMENTS, "step"} <= entry.keys():
            raise Unmapped(f"the optimizer has {', '.join(map(str, entry))} per parameter and is not Adam")
    _check_steps(paths, entries)
    count = len(groups[0]["params"])
    named = list(parameters.items())
    if any(isinstance(entry["exp_avg"], StoredWrapper) for entry in entries[0].values()):
        if count != len(named):
            raise Unmapped(f"the optimizer has {count} parameters, the model {len(named)}")
        return _of_shards(named, entries)
    flat = [entries[rank] for rank in shard_ranks]
    units = [[parameter] for parameter in named] if count == len(named) else _units(named)
    if count != len(units):
        raise Unmapped(f"the optimizer has {count} entries, the model {len(named)} parameters in {len(units)} blocks")
    return _of_units(units, flat, padded=count != len(named))


def _check_steps(paths: Sequence[Path], entries: Sequence[dict[int, dict[str, Any]]]) -> None:
    """Raise DamagedCheckpoint unless each rank has rank 0's step count. Compare one parameter that both ranks have.

    Raise TypeError for a step that is not a number.
    """
    if any(entry["step"].numel != 1 for of_rank in entries for entry in of_rank.values()):
        raise TypeError("a step that is not a number")
    for path, of_rank in zip(paths, entries, strict=True):
        number = next((number for number in of_rank if number in entries[0]), None)
        if number is None:
            continue
        first, here = (each[number]["step"].read(0, 1).item() for each in (entries[0], of_rank))
        if here != first:
            raise DamagedCheckpoint(
                f"{path} is from another save than {paths[0].name}: {here:g} updates of parameter {number} instead of "
                f"{first:g}. Copy the files of one save."
            )


Named = list[tuple[str, tuple[int, ...]]]


def _of_shards(named: Named, entries: Sequence[dict[int, dict[str, Any]]]) -> dict[str, ReadableTensor]:
    found: dict[str, ReadableTensor] = {}
    for index, (name, shape) in enumerate(named):
        if index not in entries[0]:  # the parameter was never updated
            continue
        for moment in MOMENTS:
            tensor = assemble(f"{name}.{moment}", [entry[index][moment] for entry in entries])
            if tensor.info.shape != shape:
                raise Unmapped(f"entry {index} of the optimizer is {tensor.info.shape}, {name} is {shape}")
            found[f"{name}.{moment}"] = tensor
        found[f"{name}.step"] = entries[0][index]["step"]
    return found


def _units(named: Named) -> list[Named]:
    """Group parameters as FSDP1 flattens them: one unit for all parameters outside of blocks, then one per block."""
    units: dict[str, Named] = {"": []}
    for name, shape in named:
        match = BLOCK.match(name)
        units.setdefault(match[0] if match else "", []).append((name, shape))
    return list(units.values())


def _of_units(
    units: Sequence[Named], ranks: Sequence[dict[int, dict[str, Any]]], padded: bool
) -> dict[str, ReadableTensor]:
    found: dict[str, ReadableTensor] = {}
    for index, unit in enumerate(units):
        there = [entries[index] for entries in ranks if index in entries]
        if not there:  # the unit was never updated
            continue
        numel = sum(math.prod(shape) for _, shape in unit)
        for moment in MOMENTS:
            pieces = as_pieces(entry[moment] for entry in there)
            if there[0][moment].numel == numel:  # not split
                pieces = pieces[:1]
            expected = -(-numel // len(ranks)) * len(ranks) if padded and len(pieces) > 1 else numel
            if numel_of(pieces) != expected:
                raise Unmapped(f"entry {index} of the optimizer has {numel_of(pieces)} elements instead of {expected}")
            at = 0
            for name, shape in unit:
                end = at + math.prod(shape)
                found[f"{name}.{moment}"] = join_pieces(shape, there[0][moment].dtype, cut(pieces, at, end))
                at = end
        for name, _ in unit:
            found[f"{name}.step"] = there[0]["step"]
    return found
