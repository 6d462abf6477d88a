"""Maps experts stored as one tensor each to the model's fused tensor: which slice each expert fills."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from rlhf.models.model_files import FileTensor
from rlhf.storage.file_parts import FilePart, FileParts

# The first call builds transformers' mappings of all model types, a thousand patterns. The launcher imports this module
# before it forks the ranks, so the mappings are built once.
get_checkpoint_conversion_mapping("")


def fuse_experts(
    headers: Mapping[str, FileTensor], hf_config: PretrainedConfig
) -> tuple[dict[str, FileTensor], dict[str, list[FilePart]]]:
    """Replace file tensors that transformers fuses for `hf_config` by the fused tensor, under its name in the model.

    Only fusions that keep every file tensor contiguous are replaced: stacked experts ([E, rows, columns]), and stacks
    joined along the rows (gate and up: [E, 2 * rows, columns]). Return all headers, and the parts of each fused tensor.
    """
    mapping = get_checkpoint_conversion_mapping(hf_config.model_type) or []
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    groups: dict[str, dict[str, list[str]]] = {}
    for name in sorted(headers, key=dot_natural_key):  # transformers' order
        fused, pattern = rename_source_key(name, renamings, converters)
        if pattern is not None and _stacks(by_pattern[pattern]):
            patterns = by_pattern[pattern].source_patterns
            groups.setdefault(fused, {pattern: [] for pattern in patterns})[pattern].append(name)
    kept, parts = dict(headers), dict[str, list[FilePart]]()
    for fused, stacks in groups.items():
        experts = list(zip(*stacks.values(), strict=False))
        tensors = [headers[name] for names in stacks.values() for name in names]
        if len(experts) * len(stacks) != len(tensors) or not _alike(tensors):
            continue
        heights = [headers[name].shape[0] for name in experts[0]]
        if any([headers[name].shape[0] for name in expert] != heights for expert in experts):
            continue
        start, parts[fused] = 0, []
        for name in (name for expert in experts for name in expert):
            parts[fused].append(FilePart(name, start, headers[name].shape))
            start += math.prod(headers[name].shape)
            del kept[name]
        kept[fused] = replace(tensors[0], shape=(len(experts), sum(heights), *tensors[0].shape[1:]))
    return kept, parts


def parts_in_files(shapes: Mapping[str, Sequence[int]], hf_config: PretrainedConfig) -> FileParts:
    """Return the file tensors of each weight that transformers splits or renames when it writes files.

    The result is empty unless `fuse_experts` fuses some of the weights. `shapes` are those of the model's weights.
    """
    mapping = get_checkpoint_conversion_mapping(hf_config.model_type) or []
    known = [entry for entry in mapping if isinstance(entry, WeightRenaming) or _is_stack(entry)]
    if not any(map(_is_stack, known)):
        return {}
    # transformers reads only these two attributes of the model; names and shapes are enough.
    stand_in: Any = SimpleNamespace(_weight_conversions=known, config=hf_config)
    fused, parts = False, dict[str, list[FilePart]]()
    for name, shape in shapes.items():
        weight = torch.empty(tuple(shape), device="meta")
        written = revert_weight_conversion(stand_in, {name: weight})
        files = {own: FileTensor("", "F32", tuple(tensor.shape)) for own, tensor in written.items()}
        back, found = fuse_experts(files, hf_config)
        if name in found and {own: tensor.shape for own, tensor in back.items()} == {name: tuple(shape)}:
            fused, parts[name] = True, found[name]
        elif [tensor.shape for tensor in files.values()] == [tuple(shape)]:
            parts[name] = [FilePart(own, 0, tensor.shape) for own, tensor in files.items()]
    return {name: of_name for name, of_name in parts.items() if fused and of_name[0].name != name}


def _is_stack(entry: Any) -> bool:
    return isinstance(entry, WeightConverter) and _stacks(entry)


def _stacks(converter: WeightConverter) -> bool:
    """Return whether transformers only stacks the tensors, and joins the stacks along the rows."""
    steps = [(type(step), getattr(step, "dim", None)) for step in converter.operations]
    several = len(converter.source_patterns) > 1
    return steps == [(MergeModulelist, 0), *([(Concatenate, 1)] if several else [])]


def _alike(tensors: list[FileTensor]) -> bool:
    return all(len(t.shape) == 2 for t in tensors) and len({(t.dtype, t.shape[1:]) for t in tensors}) == 1
