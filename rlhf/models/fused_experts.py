"""Maps a model's weights to the tensors in its files, where names differ and each expert may have its own tensors."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from rlhf.models.model_files import FileTensor
from rlhf.storage.file_parts import FilePart, FileParts

# The first call builds transformers' mappings of all model types, a thousand patterns. The launcher imports this module
# before it forks the ranks, so all ranks share one build.
get_checkpoint_conversion_mapping("")

STACK, JOIN = (MergeModulelist, 0), (Concatenate, 0)
"""Steps of conversions that keep each file tensor contiguous, as (class, dimension)."""


def fuse_experts(
    headers: Mapping[str, FileTensor], hf_config: PretrainedConfig
) -> tuple[dict[str, FileTensor], dict[str, list[FilePart]]]:
    """Replace file tensors that transformers fuses for `hf_config` by the fused tensor, under its name in the model.

    Replace only tensors that are contiguous in the fused tensor: stacked experts ([E, rows, columns]), stacks joined
    along the rows (gate and up: [E, 2 * rows, columns]), and tensors joined along the rows. Return all headers, and
    the parts of each fused tensor.
    """
    return _fuse(headers, get_checkpoint_conversion_mapping(hf_config.model_type) or [])


def _fuse(
    headers: Mapping[str, FileTensor], mapping: Sequence[Any]
) -> tuple[dict[str, FileTensor], dict[str, list[FilePart]]]:
    """See `fuse_experts`."""
    renamings, converters = _by_kind(mapping)
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    groups, stacked = dict[str, dict[str, list[str]]](), set[str]()
    for name in sorted(headers, key=dot_natural_key):  # in transformers' order
        fused, pattern = rename_source_key(name, renamings, converters)
        if pattern is not None and _joins(by_pattern[pattern]):
            patterns = by_pattern[pattern].source_patterns
            groups.setdefault(fused, {pattern: [] for pattern in patterns})[pattern].append(name)
            if _steps(by_pattern[pattern])[0] == STACK:
                stacked.add(fused)
    kept, parts = dict(headers), dict[str, list[FilePart]]()
    for fused, stacks in groups.items():
        experts = list(zip(*stacks.values(), strict=False))
        tensors = [headers[name] for names in stacks.values() for name in names]
        if len(experts) * len(stacks) != len(tensors) or not _alike(tensors):
            continue
        if fused not in stacked and len(experts) > 1:
            continue
        heights = [headers[name].shape[0] for name in experts[0]]
        if any([headers[name].shape[0] for name in expert] != heights for expert in experts):
            continue
        start, parts[fused] = 0, []
        for name in (name for expert in experts for name in expert):
            parts[fused].append(FilePart(name, start, headers[name].shape))
            start += math.prod(headers[name].shape)
            del kept[name]
        experts_shape = (len(experts),) if fused in stacked else ()
        kept[fused] = replace(tensors[0], shape=(*experts_shape, sum(heights), *tensors[0].shape[1:]))
    return kept, parts


@dataclass(frozen=True)
class FileConversions:
    """transformers' conversions from the tensors in a model's files to the model's weights."""

    entries: Sequence[Any]
    config: PretrainedConfig

    @classmethod
    def of(cls, model: PreTrainedModel) -> "FileConversions":
        """Return the conversions that `save_pretrained` reverts for `model`, without those that only change a prefix.

        Call this before an engine wraps `model`, because FSDP2 changes the names of classes.
        """
        found = get_model_conversion_mapping(model, add_legacy=False)
        return cls([entry for entry in found if not isinstance(entry, PrefixChange)], model.config)


def parts_in_files(shapes: Mapping[str, Sequence[int]], conversions: FileConversions) -> FileParts:
    """Return the file tensors of each weight that transformers splits or renames when it writes files.

    `shapes` are the shapes of the model's weights. A weight is left out if its file tensors are not slices of the
    weight. Files then store the weight under its own name, which transformers also reads.
    """
    known = [entry for entry in conversions.entries if isinstance(entry, WeightRenaming) or _is_joined(entry)]
    if not known:
        return {}
    # transformers reads only these two attributes of the model; names and shapes are enough.
    stand_in: Any = SimpleNamespace(_weight_conversions=known, config=conversions.config)
    parts = dict[str, list[FilePart]]()
    for name, shape in shapes.items():
        weight = torch.empty(tuple(shape), device="meta")
        written = revert_weight_conversion(stand_in, {name: weight})
        files = {own: FileTensor("", "F32", tuple(tensor.shape)) for own, tensor in written.items()}
        back, found = _fuse(files, known)
        if name in found and {own: tensor.shape for own, tensor in back.items()} == {name: tuple(shape)}:
            parts[name] = found[name]
        elif [tensor.shape for tensor in files.values()] == [tuple(shape)] and _names(files, known) == [name]:
            parts[name] = [FilePart(own, 0, tensor.shape) for own, tensor in files.items()]
    return {name: of_name for name, of_name in parts.items() if of_name[0].name != name}


def _names(files: Mapping[str, FileTensor], mapping: Sequence[Any]) -> list[str]:
    """Return the names that the tensors of `files` have in the model."""
    return [rename_source_key(name, *_by_kind(mapping))[0] for name in files]


def _by_kind(mapping: Sequence[Any]) -> tuple[list[WeightRenaming], list[WeightConverter]]:
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    return renamings, [entry for entry in mapping if isinstance(entry, WeightConverter)]


def _is_joined(entry: Any) -> bool:
    return isinstance(entry, WeightConverter) and _joins(entry)


def _joins(converter: WeightConverter) -> bool:
    """Return whether transformers only stacks the tensors, or joins stacks or tensors along the rows."""
    if len(converter.source_patterns) == 1:
        return _steps(converter) == [STACK]
    return _steps(converter) in ([STACK, (Concatenate, 1)], [JOIN])


def _steps(converter: WeightConverter) -> list[tuple[type, int | None]]:
    return [(type(step), getattr(step, "dim", None)) for step in converter.operations]


def _alike(tensors: list[FileTensor]) -> bool:
    return all(t.shape for t in tensors) and len({(t.dtype, len(t.shape), t.shape[1:]) for t in tensors}) == 1
