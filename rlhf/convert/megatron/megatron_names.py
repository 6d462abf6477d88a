"""Converts Megatron's tensors to transformers' tensors and back."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from rlhf.convert.megatron.columns import column_slice, joined_columns
from rlhf.convert.megatron.megatron_model import (
    LAYERS,
    NO_WEIGHTS,
    OUTPUT,
    MegatronModel,
    TensorSpec,
    layer_name,
    member_name,
    read_model,
)
from rlhf.convert.megatron.megatron_optimizer import OptimizerParts, Parts, check_fits
from rlhf.convert.megatron.megatron_paths import step_of
from rlhf.convert.moments import Unmapped
from rlhf.errors import UserError
from rlhf.models.hf.named_tensors import JoinedTensor, NamedTensors, Piece, zeros
from rlhf.models.hf.small_files import folder_with_config
from rlhf.models.hf.source import (
    Contents,
    FunctionTensor,
    Origin,
    ReadableTensor,
    SourceTensor,
    TensorInfo,
    TensorSource,
    TrainedSoFar,
)
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.hf_layout import MODEL_CONFIG

SCHEDULE = "the learning rate schedule"


def find_model(origin: Origin, folder: Path, *, values: bool) -> tuple[MegatronModel, Path]:
    """Return the model in `folder`, and the folder with its config.json: `--hf_model_path`, or a folder beside the
    tensors."""
    beside = (folder, folder / "huggingface", folder.parent, folder.parent / "huggingface")
    if (found := origin.model_files or folder_with_config(*beside)) is None:
        raise UserError(f"{folder} has no config.json. Set --hf_model_path to a folder with config.json.")
    return read_model(found, values=values), found


def has_value_head(parts: Parts) -> bool:
    """Return whether the output layer is the head of a critic, one value per token."""
    return OUTPUT in parts and parts[OUTPUT][0].info.shape[0] == 1


def as_transformers(
    model: MegatronModel, parts: Parts, where: Path, files: Path, read_optimizer: Callable[[], OptimizerParts]
) -> NamedTensors:
    """Return transformers' tensors of `model` from `parts`, which were read in `where`, with the optimizer's moments.

    The optimizer's float32 weights replace weights in 16 bits. `read_optimizer` raises Unmapped if the checkpoint has
    no state that can be matched to the weights. Raises UserError for a missing tensor, a wrong shape, or a tensor that
    the model lacks, and DamagedCheckpoint if the ranks' dtypes differ.
    """
    contents = Contents({}, progress=TrainedSoFar(step_of(where)), model_files=files, absent=[SCHEDULE])
    tensors = _of_model(model, parts, where, files)
    try:
        optimizer = read_optimizer()
        check_fits(optimizer, parts)
    except Unmapped as reason:
        contents.absent.insert(0, f"the optimizer's moments: {reason}")
        return NamedTensors("megatron", tensors, {}, contents)
    in_16_bits = {name: of for name, of in optimizer.masters.items() if parts[name][0].info.dtype != torch.float32}
    refined = {name: list(map(_refined, parts[name], masters)) for name, masters in in_16_bits.items()}
    tensors = _of_model(model, {**parts, **refined}, where, files)
    moments: dict[str, ReadableTensor] = {}
    for moment, found in optimizer.moments.items():
        of_moment = _of_model(model, found, where, files)
        moments |= {f"{name}.{moment}": tensor for name, tensor in of_moment.items()}
    moments |= {f"{name}.step": _one_number(optimizer.step) for name in tensors}
    contents.progress = replace(contents.progress, optimizer_steps=optimizer.step)
    return NamedTensors("megatron", tensors, moments, contents)


def _refined(weight: ReadableTensor, master: ReadableTensor) -> FunctionTensor:
    """Return the elements of `master`, but the weight's element where the master's does not round to it.

    In the format fully_reshardable, megatron-core 0.16 can write zeros for the last elements of the masters.
    """

    def read(start: int, stop: int) -> Tensor:
        rounded, exact = weight.read(start, stop), master.read(start, stop)
        return torch.where(exact.to(rounded.dtype) == rounded, exact, rounded.float())

    return FunctionTensor(master.info, read)


def _one_number(number: int) -> FunctionTensor:
    info = TensorInfo((), torch.float32)
    return FunctionTensor(info, lambda start, stop: torch.tensor([float(number)])[start:stop])


def _of_model(model: MegatronModel, parts: Parts, where: Path, files: Path) -> dict[str, ReadableTensor]:
    tensors: dict[str, ReadableTensor] = {}
    known = {OUTPUT} if model.tied else set()
    for spec in model.specs():
        for layer in range(model.layers if spec.stage == "layer" else 1):
            name = layer_name(layer, spec)
            if spec.alias is not None and f"{LAYERS}{layer}.{spec.alias}" in parts:
                name = f"{LAYERS}{layer}.{spec.alias}"
            if name not in parts:
                raise UserError(_missing(model, where, name, files))
            known.add(name)
            _check(spec, parts[name], f"{where}: {name}", files)
            for member, pieces in _pieces(spec, parts[name]).items():
                info = TensorInfo(spec.shape(dict(spec.members)[member]), parts[name][0].info.dtype)
                tensors[member_name(layer, spec, member)] = JoinedTensor(info, pieces)
    if unknown := sorted(name for name in parts if name not in known and not NO_WEIGHTS.search(name)):
        raise UserError(
            f"{where} has {unknown[0]}, which transformers' {model.model_type} lacks (config.json in {files}). Set "
            "--hf_model_path to the trained model."
        )
    return tensors


def _pieces(spec: TensorSpec, tensors: Sequence[ReadableTensor]) -> dict[str, list[Piece]]:
    """Map members of one Megatron tensor to their pieces in the ranks' parts."""
    if spec.split == "columns":
        ((member, rows),) = spec.members
        return {member: [(joined_columns(tensors), 0, rows * spec.width)]}
    found: defaultdict[str, list[tuple[int, Piece]]] = defaultdict(list)
    for rank, part in enumerate(tensors if spec.split == "rows" else tensors[:1]):
        runs = spec.runs(rank, len(tensors))
        for run in [spec.vocabulary_run(rank, part.info.shape[0])] if spec.is_vocabulary else runs:
            piece = part, run.at * spec.width, (run.at + run.rows) * spec.width
            found[run.name].append((run.row, piece))
    return {name: [piece for _, piece in sorted(rows, key=lambda row: row[0])] for name, rows in found.items()}


def _check(spec: TensorSpec, tensors: Sequence[ReadableTensor], where: str, files: Path) -> None:
    if len({part.info.dtype for part in tensors}) > 1:
        raise DamagedCheckpoint(f"{where} has different dtypes on different ranks")
    ranks = len(tensors)
    rows = spec.rows // (ranks if spec.split == "rows" else 1)
    for shape in (part.info.shape for part in tensors):
        if spec.is_vocabulary:
            right = len(shape) == 2 and shape == tensors[0].info.shape and shape[0] * ranks >= spec.rows
            rows = shape[0] if right else -(-spec.rows // ranks)
        if shape != spec.shape(rows, ranks):
            raise UserError(
                f"{where} has the shape {list(shape)} where {list(spec.shape(rows, ranks))} is expected of "
                f"{ranks} tensor parallel {'rank' if ranks == 1 else 'ranks'}: another rank's folder is missing, or "
                f"config.json ({files}) is another model's. Restore the folder, or set --hf_model_path."
            )


def _missing(model: MegatronModel, where: Path, name: str, files: Path) -> str:
    if name == OUTPUT:
        remedy = f"set tie_word_embeddings=true in {files / MODEL_CONFIG}; otherwise restore the tensor"
        return f"{where} has no {OUTPUT}. If the embeddings are tied, {remedy}."
    return f"{where} has no {name}. Restore the missing files, or set --hf_model_path if {files} is another model's."


def as_megatron(
    model: MegatronModel, source: TensorSource, *, rank: int = 0, ranks: int = 1, vocabulary: int | None = None
) -> dict[str, JoinedTensor]:
    """Return the tensors of tensor parallel rank `rank` by Megatron's names.

    `vocabulary` is the number of rows of embedding and output layer over all ranks, with padding; None adds no padding.
    Raises UserError when `source` lacks a tensor of the model, has a tensor of the wrong shape, or has a tensor that
    the model lacks."""
    tensors: dict[str, JoinedTensor] = {}
    known = {"lm_head.weight"} if model.tied else set()
    for spec in model.specs():
        for layer in range(model.layers if spec.stage == "layer" else 1):
            for member, rows in spec.members:
                known.add(full := member_name(layer, spec, member))
                _check_member(source, full, spec.shape(rows))
            tensors[layer_name(layer, spec)] = _rank_tensor(spec, layer, source, rank, ranks, vocabulary)
    if unknown := sorted(set(source.contents.tensors) - known):
        raise UserError(
            f"{unknown[0]} would be lost: Megatron's {model.model_type} lacks it. Convert a model without this tensor."
        )
    return tensors


def _rank_tensor(
    spec: TensorSpec, layer: int, source: TensorSource, rank: int, ranks: int, vocabulary: int | None
) -> JoinedTensor:
    if spec.split == "columns":
        columns = spec.width // ranks
        whole = SourceTensor(source, member_name(layer, spec, spec.members[0][0]))
        chosen = column_slice(whole, rank * columns, columns)
        return JoinedTensor(chosen.info, [(chosen, 0, chosen.info.numel)])
    rows, runs = spec.rows // (ranks if spec.split == "rows" else 1), list(spec.runs(rank, ranks))
    if spec.is_vocabulary:
        rows = (vocabulary or spec.rows) // ranks
        runs = [spec.vocabulary_run(rank, rows)]
    pieces: list[Piece] = []
    for run in runs:
        tensor = SourceTensor(source, member_name(layer, spec, run.name))
        pieces.append((tensor, run.row * spec.width, (run.row + run.rows) * spec.width))
    info = TensorInfo(spec.shape(rows), pieces[0][0].info.dtype)
    padding = (rows - sum(run.rows for run in runs)) * spec.width
    return JoinedTensor(info, [*pieces, (zeros(info), 0, padding)])


def _check_member(source: TensorSource, name: str, shape: tuple[int, ...]) -> None:
    info = source.contents.tensors.get(name)
    if info is None:
        raise UserError(f"The checkpoint has no {name}, which config.json requires. Set --hf_model_path.")
    if info.shape != shape:
        raise UserError(
            f"{name} has the shape {list(info.shape)}, but config.json requires {list(shape)}. Set --hf_model_path."
        )
