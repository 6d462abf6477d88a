"""Converts Megatron's tensors to transformers' tensors and back."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf.convert.megatron.megatron_model import (
    LAYERS,
    OUTPUT,
    MegatronModel,
    MegatronTensor,
    layer_name,
    member_name,
    read_model,
)
from rlhf.convert.megatron.megatron_paths import step_of
from rlhf.convert.slices import ColumnSlice, JoinedColumns, Readable, SlicedSource, TensorSlice, Zeros
from rlhf.errors import UserError
from rlhf.models.hf.source import Origin, SourceTensor, TensorSource, TrainedSoFar
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.hf_layout import MODEL_CONFIG

Shapes = dict[str, tuple[int, ...]]
Slices = dict[str, list[TensorSlice]]
ABSENT = ("the optimizer's moments", "the learning rate schedule")
NO_WEIGHTS = re.compile(r"_extra_state|rotary_pos_emb\.inv_freq$")
"""Names in the model's state dict that are not weights."""


@dataclass(frozen=True)
class RankPart:
    """One rank's part of a tensor, and its shape."""

    tensor: Readable
    shape: tuple[int, ...]


def find_model(origin: Origin, folder: Path, *, values: bool) -> tuple[MegatronModel, Path]:
    """Return the model in `folder`, and the folder with its config.json: `--hf_model_path`, or one beside the
    tensors."""
    if origin.model_files is not None:
        return read_model(origin.model_files, values=values), origin.model_files
    for place in (folder, folder / "huggingface", folder.parent, folder.parent / "huggingface"):
        if (place / MODEL_CONFIG).is_file():
            return read_model(place, values=values), place
    raise UserError(f"{folder} has no config.json. Set --hf_model_path to a folder with it.")


def has_value_head(parts: Mapping[str, Sequence[RankPart]]) -> bool:
    """Return whether the output layer is the head of a critic, one value per token."""
    return OUTPUT in parts and parts[OUTPUT][0].shape[0] == 1


def as_transformers(
    model: MegatronModel, parts: Mapping[str, Sequence[RankPart]], where: Path, files: Path
) -> SlicedSource:
    """Return transformers' tensors of `model`. `parts`, read from `where`, has a part per tensor parallel rank by
    Megatron's names. Raises UserError for a missing tensor, a wrong shape, or a tensor that the model lacks."""
    shapes: Shapes = {}
    slices: Slices = {}
    known = {OUTPUT} if model.tied else set()
    for part in model.parts():
        for layer in range(model.layers if part.stage == "layer" else 1):
            name = layer_name(layer, part)
            if part.alias is not None and f"{LAYERS}{layer}.{part.alias}" in parts:
                name = f"{LAYERS}{layer}.{part.alias}"
            if name not in parts:
                raise UserError(_missing(model, where, name, files))
            known.add(name)
            _check(model, part, parts[name], f"{where}: {name}", files)
            for member, found in _slices(part, parts[name]).items():
                rows = dict(part.members)[member]
                slices[member_name(layer, part, member)] = found
                shapes[member_name(layer, part, member)] = part.shape(rows)
    if unknown := sorted(name for name in parts if name not in known and not NO_WEIGHTS.search(name)):
        raise UserError(
            f"{where} has {unknown[0]}, which transformers' {model.model_type} lacks. Set --hf_model_path to the "
            f"trained model (config.json was read in {files})."
        )
    source = SlicedSource("megatron", shapes, slices, model_files=files, absent=ABSENT)
    source.contents.progress = TrainedSoFar(step_of(where))
    return source


def _slices(part: MegatronTensor, tensors: Sequence[RankPart]) -> Slices:
    if part.split == "columns":
        ((member, rows),) = part.members
        beside = JoinedColumns([own.tensor for own in tensors], part.width // len(tensors))
        return {member: [TensorSlice(beside, 0, rows * part.width)]}
    found: defaultdict[str, list[tuple[int, TensorSlice]]] = defaultdict(list)
    for rank, own in enumerate(tensors if part.split == "rows" else tensors[:1]):
        runs = part.runs(rank, len(tensors))
        for run in [part.vocabulary_run(rank, own.shape[0])] if part.is_vocabulary else runs:
            piece = TensorSlice(own.tensor, run.at * part.width, (run.at + run.rows) * part.width)
            found[run.name].append((run.row, piece))
    return {name: [piece for _, piece in sorted(rows, key=lambda row: row[0])] for name, rows in found.items()}


def _check(model: MegatronModel, part: MegatronTensor, tensors: Sequence[RankPart], where: str, files: Path) -> None:
    if len({own.tensor.dtype for own in tensors}) > 1:
        raise DamagedCheckpoint(f"{where} has different dtypes on different ranks")
    ranks = len(tensors)
    rows = part.rows // (ranks if part.split == "rows" else 1)
    for own in tensors:
        if part.is_vocabulary:
            right = len(own.shape) == 2 and own.shape == tensors[0].shape and own.shape[0] * ranks >= part.rows
            rows = own.shape[0] if right else -(-part.rows // ranks)
        if own.shape != part.shape(rows, ranks):
            raise UserError(
                f"{where} has the shape {list(own.shape)} where {list(part.shape(rows, ranks))} is expected of "
                f"{ranks} tensor parallel {'rank' if ranks == 1 else 'ranks'}: another rank's folder is missing, or "
                f"config.json ({files}) is another model's."
            )


def _missing(model: MegatronModel, where: Path, name: str, files: Path) -> str:
    if name == OUTPUT:
        remedy = f"set tie_word_embeddings=true in {files / MODEL_CONFIG}; otherwise restore the tensor"
        return f"{where} has no {OUTPUT}. If the embeddings are tied, {remedy}."
    return f"{where} has no {name}. Restore the missing files, or set --hf_model_path if {files} is another model's."


def as_megatron(
    model: MegatronModel, source: TensorSource, *, rank: int = 0, ranks: int = 1, vocabulary: int | None = None
) -> tuple[Shapes, Slices]:
    """Return shapes and slices of tensor parallel rank `rank`'s tensors, by Megatron's names; `vocabulary` is the
    number of padded rows. Raises UserError when `source` lacks a tensor of the model, or has it in another shape."""
    shapes: Shapes = {}
    slices: Slices = {}
    known = {"lm_head.weight"} if model.tied else set()
    for part in model.parts():
        for layer in range(model.layers if part.stage == "layer" else 1):
            for member, rows in part.members:
                known.add(full := member_name(layer, part, member))
                _check_member(source, full, part.shape(rows))
            name = layer_name(layer, part)
            shapes[name], slices[name] = _rank_slices(part, layer, source, rank, ranks, vocabulary)
    if unknown := sorted(set(source.contents.tensors) - known):
        raise UserError(f"{unknown[0]} would be lost: Megatron's {model.model_type} has no such tensor.")
    return shapes, slices


def _rank_slices(
    part: MegatronTensor, layer: int, source: TensorSource, rank: int, ranks: int, vocabulary: int | None
) -> tuple[tuple[int, ...], list[TensorSlice]]:
    if part.split == "columns":
        columns = part.width // ranks
        whole = SourceTensor(source, member_name(layer, part, part.members[0][0]))
        chosen = ColumnSlice(whole, part.width, rank * columns, columns)
        return part.shape(part.rows, ranks), [TensorSlice(chosen, 0, part.rows * columns)]
    rows, runs = part.rows // (ranks if part.split == "rows" else 1), list(part.runs(rank, ranks))
    if part.is_vocabulary:
        rows = (vocabulary or part.rows) // ranks
        runs = [part.vocabulary_run(rank, rows)]
    found = []
    for run in runs:
        tensor = SourceTensor(source, member_name(layer, part, run.name))
        found.append(TensorSlice(tensor, run.row * part.width, (run.row + run.rows) * part.width))
    filled = sum(run.rows for run in runs)
    if filled < rows:
        found.append(TensorSlice(Zeros(found[0].tensor.dtype), 0, (rows - filled) * part.width))
    return part.shape(rows), found


def _check_member(source: TensorSource, name: str, shape: tuple[int, ...]) -> None:
    info = source.contents.tensors.get(name)
    if info is None:
        raise UserError(f"The checkpoint has no {name}, which its config.json requires.")
    if info.shape != shape:
        raise UserError(f"{name} has the shape {list(info.shape)}, but config.json requires {list(shape)}.")
