"""Assembles the tensors of a DeepSpeed save from its ranks' flat partitions, without reading the partitions.

Stages 1 and 2 concatenate all parameters of a group into one flat tensor. Each rank has an equal range of this tensor.
Stage 3 pads each parameter and cuts it into one equal range per rank. Each rank concatenates its ranges in the order of
the parameters. The moments have the layout of the weights.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf.convert.deepspeed.deepspeed_files import (
    MODEL_STATES,
    OPTIM_STATES,
    check_no_others,
    open_all,
    open_first,
)
from rlhf.convert.moments import MOMENTS
from rlhf.convert.stored_tensor import Piece, StoredTensor, as_pieces, join_pieces, numel_of
from rlhf.models.hf.named_tensors import JoinedTensor
from rlhf.models.hf.source import cut
from rlhf.storage.disk_errors import DamagedCheckpoint

PARTITIONS, PARTITIONS_3 = "single_partition_of_fp32_groups", "fp32_flat_groups"
NO_MOMENTS = "The moments: this save lacks AdamW's state for some or all parameters."
NO_NAMES = "{}: at stage 0 DeepSpeed saves them without names, and their order is unknown."

SAMPLE = 1 << 16
"""Number of elements of a parameter to compare at stage 0."""

Shapes = Mapping[str, Sequence[int]]


@dataclass
class Assembled:
    """The weights, the moments and the step counts of a save, by name, and a line for each part that is absent."""

    tensors: dict[str, JoinedTensor] = field(default_factory=dict)
    moments: dict[str, JoinedTensor] = field(default_factory=dict)
    steps: dict[str, Tensor] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)

    def add_weight(self, name: str, shape: Sequence[int], pieces: list[Piece]) -> None:
        self.tensors[name] = join_pieces(shape, pieces[0][0].dtype, pieces)

    def add_moments(self, name: str, shape: Sequence[int], moments: Mapping[str, list[Piece]], step: Any) -> None:
        for moment, pieces in moments.items():
            self.moments[f"{name}.{moment}"] = join_pieces(shape, pieces[0][0].dtype, pieces)
        self.steps[name] = _scalar(step)


def assemble(save: Path, states: Mapping[str, Any]) -> Assembled:
    """Assemble the tensors of `save`. `states` are rank 0's model states. Raises UserError for a rank's missing file,
    and DamagedCheckpoint for partitions that do not fit the parameters."""
    if states.get("param_shapes") is None:
        check_no_others(save, MODEL_STATES, 1)
        check_no_others(save, OPTIM_STATES, 0)
        return _stage_0(states)
    content = open_first(save, OPTIM_STATES)
    first = _optimizer(content, save)
    counts = first["partition_count"]
    world_size = max(counts) if isinstance(counts, list) else int(counts)
    ranks = [_optimizer(content, save) for content in open_all(save, OPTIM_STATES, world_size)]
    check_no_others(save, MODEL_STATES, world_size)
    if PARTITIONS in first:
        _check_order(save, states["param_shapes"], ranks, content.get("ds_config"))
        return _stages_1_and_2(save, states, ranks)
    return _stage_3(save, states, ranks)


def _optimizer(content: Mapping[str, Any], save: Path) -> dict[str, Any]:
    state = content.get("optimizer_state_dict", {})
    if "partition_count" not in state or not {PARTITIONS, PARTITIONS_3} & state.keys():
        raise DamagedCheckpoint(f"{save} has optimizer states without ZeRO's float32 partitions")
    return state


def _stage_0(states: Mapping[str, Any]) -> Assembled:
    """Assemble whole parameters. Float32 copies and moments are in the optimizer's order. This order follows from
    `param_names`, if the optimizer was given named parameters, or else from a comparison of the float32 copies with the
    weights."""
    made = Assembled()
    for name, tensor in _unique_tensors(states["module"], {}):
        made.add_weight(name, tensor.shape, as_pieces([tensor]))
    shapes = {name: made.tensors[name].info.shape for name in made.tensors if name not in states["buffer_names"]}
    optimizer = states.get("optimizer") or {}
    flat, parts = optimizer.get("fp32_groups_flat"), optimizer.get("fp32_groups")
    inner = optimizer.get("optimizer_state_dict", optimizer)
    state = [inner["state"][number] for number in sorted(inner.get("state") or {})]
    if not state or any(moment not in each for moment in MOMENTS for each in state):
        made.absent.append(NO_MOMENTS)
        return made
    if named := sorted(names := inner["param_groups"][0].get("param_names") or ()) == sorted(shapes):
        shapes = {name: shapes[name] for name in names}
    found = [tuple(each[MOMENTS[0]].shape) for each in state]
    expected = [(sum(map(math.prod, shapes.values())),)] if flat else [tuple(shape) for shape in shapes.values()]
    weights = as_pieces(flat or (parts[0] if parts else []))
    known = len(inner["param_groups"]) == 1 and (named or _in_order(made, shapes, weights))
    if not known or found != expected:
        made.absent.append(NO_NAMES.format("The float32 weights and the moments" if weights else "The moments"))
        return made
    moments = {moment: as_pieces(each[moment] for each in state) for moment in MOMENTS}
    _add_consecutive(
        made, shapes, [0] * len(shapes), weights, moments, state[0].get("step", inner["param_groups"][0].get("step"))
    )
    return made


def _in_order(made: Assembled, shapes: Shapes, masters: list[Piece]) -> bool:
    """Return whether `masters`, the float32 weights, are in the order of `shapes`: compare the first elements of each
    parameter with the model's weights. Return False without masters, because nothing else shows the order."""
    at = 0
    for name, shape in shapes.items():
        stored = made.tensors[name].read(0, min(math.prod(shape), SAMPLE))
        sample = cut(masters, at, at + len(stored))
        found = [piece.read(first, last) for piece, first, last in sample]
        if not torch.equal(torch.cat([stored[:0].float(), *found]).to(stored.dtype), stored):
            return False
        at += math.prod(shape)
    return True


def _stages_1_and_2(save: Path, states: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]) -> Assembled:
    made = Assembled()
    trained = {name for shapes in states["param_shapes"] for name in shapes}
    for name, tensor in _unique_tensors(states["module"], states.get("shared_params") or {}):
        if name not in trained:
            made.add_weight(name, tensor.shape, as_pieces([tensor]))
    for group, shapes in enumerate(states["param_shapes"]):
        weights = as_pieces(rank[PARTITIONS][group] for rank in ranks)
        paddings = ranks[0].get("param_alignment_paddings")
        gaps = paddings[group] if paddings else [0] * len(shapes)
        needed, found = sum(map(math.prod, shapes.values())) + sum(gaps), numel_of(weights)
        # DeepSpeed pads the end, depending on its version, at most to a multiple of twice the number of ranks.
        if not needed <= found < needed + 2 * len(ranks) or len(gaps) != len(shapes):
            raise DamagedCheckpoint(_wrong_size(save, group, found, needed))
        moments, step = _moments(ranks, group)
        _add_consecutive(made, shapes, gaps, weights, moments, step)
    return _without_partial_moments(made, trained)


def _check_order(save: Path, groups: Sequence[Shapes], ranks: Sequence[Mapping[str, Any]], config: Any) -> None:
    """Raise DamagedCheckpoint if the parameters that a rank's file lists are not those in the rank's partition."""
    # With round_robin_gradients the files list the parameters in another order than the partition has.
    if not isinstance(config, dict) or config.get("zero_optimization", {}).get("round_robin_gradients"):
        return
    for group, shapes in enumerate(groups):
        gaps = ranks[0].get("param_alignment_paddings", [[0] * len(shapes)] * len(groups))[group]
        at, ranges = 0, {}
        for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
            ranges[name] = at, at + math.prod(shape)
            at = ranges[name][1] + gap
        begin = 0
        for number, rank in enumerate(ranks):
            end = begin + rank[PARTITIONS][group].numel
            present = {name for name, (first, last) in ranges.items() if first < end and begin < last}
            if "param_slice_mappings" in rank and present != rank["param_slice_mappings"][group].keys():
                raise DamagedCheckpoint(
                    f"{save}: the optimizer states of rank {number} have the wrong parameters: the file belongs to "
                    "another rank or another save. Copy it again, or set another --tag."
                )
            begin = end


def _stage_3(save: Path, states: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]) -> Assembled:
    made = Assembled()
    for name in states["buffer_names"]:
        made.add_weight(name, states["module"][name].shape, as_pieces([states["module"][name]]))
    if frozen := states.get("frozen_param_shapes"):
        parts = [each["frozen_param_fragments"] for each in open_all(save, MODEL_STATES, len(ranks))]
        for name, shape in frozen.items():
            made.add_weight(name, shape, cut(as_pieces(part[name] for part in parts), 0, math.prod(shape)))
    shapes = {name: shape for group in states["param_shapes"] for name, shape in group.items()}
    groups = range(len(ranks[0][PARTITIONS_3]))
    weights = [as_pieces(rank[PARTITIONS_3][group] for group in groups) for rank in ranks]
    found = [_moments([rank], group) for rank in ranks for group in groups]
    complete = all(set(moments) == set(MOMENTS) for moments, _ in found)
    _check_steps([{"step": step} for _, step in found if step is not None])
    at, needed = 0, sum(-(-math.prod(shape) // len(ranks)) for shape in shapes.values())
    for number, flat in enumerate(weights):
        if numel_of(flat) != needed:
            raise DamagedCheckpoint(_wrong_size(save, number, numel_of(flat), needed))
    moments = {
        moment: [
            [piece for group in groups for piece in found[rank * len(groups) + group][0][moment]]
            for rank in range(len(ranks))
        ]
        for moment in (MOMENTS if complete else ())
    }
    for name, shape in shapes.items():
        numel = math.prod(shape)
        here = at, at + -(-numel // len(ranks))
        made.add_weight(name, shape, _cut_ranks(weights, here, numel))
        if complete:
            made.add_moments(
                name, shape, {key: _cut_ranks(flat, here, numel) for key, flat in moments.items()}, found[0][1]
            )
        at = here[1]
    return _without_partial_moments(made, shapes)


def _cut_ranks(flats: Sequence[list[Piece]], here: tuple[int, int], numel: int) -> list[Piece]:
    """Concatenate the range `here` of each rank, and return the first `numel` elements."""
    return cut([piece for flat in flats for piece in cut(flat, *here)], 0, numel)


def _add_consecutive(
    made: Assembled,
    shapes: Shapes,
    gaps: Sequence[int],
    weights: list[Piece],
    moments: Mapping[str, list[Piece]],
    step: Any,
) -> None:
    at = 0
    for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
        end = at + math.prod(shape)
        if weights:
            made.add_weight(name, shape, cut(weights, at, end))
        if moments:
            made.add_moments(name, shape, {key: cut(pieces, at, end) for key, pieces in moments.items()}, step)
        at = end + gap


def _moments(ranks: Sequence[Mapping[str, Any]], group: int) -> tuple[dict[str, list[Piece]], Any]:
    """Return the flat moments of a group and its step count; ({}, None) if a rank lacks a moment."""
    states: list[Mapping[str, Any]] = []
    for rank in ranks:
        inner = rank.get("base_optimizer_state") or rank.get("optimizer_state_dict") or {}
        state = inner[group] if isinstance(inner, list) else inner.get("state", {}).get(group, {})
        if any(moment not in state for moment in MOMENTS):
            return {}, None
        states.append(state)
    step = states[0].get("step", ranks[0].get("base_optimizer_state_step"))
    _check_steps(states)
    if step is None and isinstance(inner, dict):
        step = inner["param_groups"][group].get("step")
    return {moment: as_pieces(state[moment] for state in states) for moment in MOMENTS}, step


def _check_steps(states: Sequence[Mapping[str, Any]]) -> None:
    steps = [_scalar(state["step"]).item() for state in states if "step" in state]
    if len(set(steps)) > 1:
        raise DamagedCheckpoint(
            f"The ranks' optimizer states have different steps ({', '.join(f'{step:g}' for step in steps[:8])}): the "
            "files are not all of one save. Copy them again, or set another --tag."
        )


def _unique_tensors(
    module: Mapping[str, StoredTensor], shared: Mapping[str, str]
) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the tensors of a module. Of tensors that share bytes in the file, yield only the first."""
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for name, tensor in module.items():
        key = tensor.byte, tensor.shape
        if name not in shared and (key not in seen or not tensor.numel):
            seen.add(key)
            yield name, tensor


def _without_partial_moments(made: Assembled, trained: Shapes | set[str]) -> Assembled:
    if any(name not in made.steps for name in trained):
        made.moments, made.steps = {}, {}
        made.absent.append(NO_MOMENTS)
    return made


def _scalar(step: Any) -> Tensor:
    value = step.read(0, 1)[0] if isinstance(step, StoredTensor) else torch.tensor(float(step or 0))
    return value.float()


def _wrong_size(save: Path, number: int, found: int, needed: int) -> str:
    return (
        f"{save}: flat partition {number} has {found} numbers, but its parameters have {needed}: the files are not all "
        "of one save. Set another --tag."
    )
