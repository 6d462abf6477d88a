"""Reads layout `megatron`: a folder `mp_rank_XX_YYY` of each tensor parallel rank XX and pipeline rank YYY.

Each folder has a file of `torch.save` with the rank's weights under `model`, or under `model0`, `model1` and so on with
virtual pipeline stages. Layers count from zero in each stage. Only ranges of the files are read.
"""

import re
from collections.abc import Mapping
from functools import partial
from itertools import count, takewhile
from pathlib import Path
from typing import Any

from rlhf.convert.megatron.megatron_model import EMBEDDING, LAYERS, NORM
from rlhf.convert.megatron.megatron_names import as_transformers, find_model, has_value_head
from rlhf.convert.megatron.megatron_optimizer import MASTERS, OptimizerParts, updates_in
from rlhf.convert.megatron.megatron_paths import find_folder
from rlhf.convert.megatron.megatron_pickles import ALLOWED
from rlhf.convert.megatron.rank_optimizer import moments_of_rank
from rlhf.convert.moments import MOMENTS
from rlhf.convert.stored_tensor import StoredTensor, open_torch_file
from rlhf.errors import UserError
from rlhf.models.hf.named_tensors import NamedTensors
from rlhf.models.hf.source import Origin, ReadableTensor
from rlhf.storage.disk_errors import DamagedCheckpoint

NAME = "megatron"
RANK = re.compile(r"mp_rank_(\d\d+)(?:_(\d\d\d+))?")
FILES = ("model_states.pt", "model_optim_rng.pt", "model.pt")
"""Names of a rank's file: the documented name, Megatron-LM's name, and the name in verl's first releases."""
LAYER = re.compile(re.escape(LAYERS) + r"(\d+)\.(.+)")

RankFiles = dict[tuple[int, int], Path]
"""Files by tensor parallel rank and pipeline rank."""
Chunk = dict[str, list[ReadableTensor]]
"""Tensors of one (virtual) pipeline stage by name, one per tensor parallel rank."""


def recognises(origin: Origin) -> bool:
    """Return whether the folder, or a folder in it (see `find_folder`), has rank folders."""
    return find_folder(origin, _has_ranks) is not None


def open_source(origin: Origin) -> NamedTensors:
    """Open the model from the files of all ranks. Raises UserError that names a missing folder or file."""
    folder = find_folder(origin, _has_ranks)
    if folder is None:
        raise UserError(
            f"{origin.path / (origin.tag or '')} has no folders mp_rank_XX_YYY. Give the folder that contains them."
        )
    files = _rank_files(folder)
    contents = {path: open_torch_file(path, ALLOWED) for _, path in sorted(files.items())}
    _check_iterations(contents)
    weights = {path: _chunks(content, path) for path, content in contents.items()}
    chunks = _in_order(files, weights)
    _check_ends(folder, chunks)
    parts = _of_whole_model(chunks)
    model, model_files = find_model(origin, folder, values=has_value_head(parts))
    remedy = "Set --hf_model_path to the folder of the model that was trained, or restore the missing ranks."
    model.check_tensor_ranks(1 + max(rank for rank, _ in files), f"{folder}: tensor parallel ranks", remedy)
    return as_transformers(model, parts, folder, model_files, partial(_optimizer, files, contents, weights))


def _optimizer(
    files: RankFiles, contents: Mapping[Path, Any], weights: Mapping[Path, list[dict[str, StoredTensor]]]
) -> OptimizerParts:
    states = {path: content.get("optimizer") for path, content in contents.items() if isinstance(content, dict)}
    found = {path: moments_of_rank(states.get(path), weights[path], path) for path in contents}

    def of_model(kind: str) -> Chunk:
        return _of_whole_model(_in_order(files, {path: kinds[kind] for path, kinds in found.items()}))

    moments = {moment: of_model(moment) for moment in MOMENTS}
    return OptimizerParts(moments, updates_in(list(states.values()), min(files.values()).parent), of_model(MASTERS))


def _has_ranks(folder: Path) -> bool:
    return any(RANK.fullmatch(path.name) for path in folder.glob("mp_rank_*"))


def _rank_files(folder: Path) -> RankFiles:
    found: RankFiles = {}
    for path in folder.glob("mp_rank_*"):
        if (match := RANK.fullmatch(path.name)) is None:
            raise UserError(f"{path}: expert parallel ranks are not supported. Save with one expert parallel rank.")
        file = next((path / name for name in FILES if (path / name).is_file()), None)
        if file is None:
            raise UserError(f"{path} has no {FILES[0]} (nor {' or '.join(FILES[1:])}). Restore it.")
        found[int(match[1]), int(match[2] or 0)] = file
    ranks, stages = (1 + max(numbers) for numbers in zip(*found, strict=True))
    for stage in range(stages):
        for rank in range(ranks):
            if (rank, stage) not in found:
                name = f"mp_rank_{rank:02d}_{stage:03d}"
                raise UserError(f"{folder} lacks {name} of {ranks} x {stages} ranks (tensor x pipeline). Restore it.")
    return found


def _check_iterations(contents: Mapping[Path, Any]) -> None:
    iterations = {path: content.get("iteration") for path, content in contents.items() if isinstance(content, dict)}
    first = next(iter(iterations), None)
    for path, iteration in iterations.items():
        if first is not None and iteration != iterations[first]:
            raise UserError(
                f"{path} is of iteration {iteration}, {first} of {iterations[first]}. Copy all files of one save."
            )


def _in_order(files: RankFiles, chunks: Mapping[Path, list[dict[str, StoredTensor]]]) -> list[Chunk]:
    """Return the chunks of all ranks in the order of the model's layers."""
    stages = [_stage(files, chunks, stage) for stage in range(1 + max(stage for _, stage in files))]
    if len({len(of_stage) for of_stage in stages}) > 1:
        raise UserError(
            f"{min(files.values()).parent.parent}: the pipeline ranks have different numbers of virtual stages. "
            "Restore all files of one save."
        )
    # The first chunks of all stages come before their second chunks.
    return [stage[chunk] for chunk in range(len(stages[0])) for stage in stages]


def _stage(files: RankFiles, chunks: Mapping[Path, list[dict[str, StoredTensor]]], stage: int) -> list[Chunk]:
    paths = [path for (_, number), path in sorted(files.items()) if number == stage]
    ranks = [chunks[path] for path in paths]
    result: list[Chunk] = []
    for number, first in enumerate(ranks[0]):
        result.append({name: [] for name in first})
        for of_rank, path in zip(ranks, paths, strict=True):
            if len(of_rank) != len(ranks[0]) or of_rank[number].keys() != first.keys():
                raise UserError(f"{path} and {paths[0]} have different tensors. Restore both from one save.")
            for name, tensor in of_rank[number].items():
                result[-1][name].append(tensor)
    return result


def _chunks(content: Any, path: Path) -> list[dict[str, StoredTensor]]:
    if isinstance(content, dict) and "model" in content:
        content = [content["model"]]
    elif isinstance(content, dict) and "model0" in content:
        content = [content[key] for key in takewhile(content.__contains__, (f"model{number}" for number in count()))]
    elif isinstance(content, dict):
        content = [content]
    if not isinstance(content, list) or not all(isinstance(chunk, dict) for chunk in content):
        raise DamagedCheckpoint(f"{path} has no weights of Megatron (`model`, or `model0` and so on)")
    found = []
    for chunk in content:
        tensors = {key: value for key, value in chunk.items() if isinstance(value, StoredTensor)}
        if not tensors:
            raise UserError(f"{path} has no named tensors: it is a legacy model. Save it with megatron-core.")
        found.append({str(key).removeprefix("module."): value for key, value in tensors.items()})
    return found


def _check_ends(folder: Path, chunks: list[Chunk]) -> None:
    """Raise UserError if the model's first tensor is only in later stages, or its last tensor only in earlier stages.

    A tensor that no stage has is not an error here.
    """
    for name, stage, which in ((EMBEDDING, 0, "first"), (NORM, -1, "last")):
        found = [number for number, chunk in enumerate(chunks) if name in chunk]
        if found and range(len(chunks))[stage] not in found:
            raise UserError(
                f"{folder}: {name} is not in the {which} pipeline stage: the ranks' folders are mixed up. Copy them "
                "again."
            )


def _of_whole_model(chunks: list[Chunk]) -> Chunk:
    """Merge the tensors of all chunks, with layer numbers of the whole model."""
    parts: Chunk = {}
    before = 0
    for chunk in chunks:
        layers = 0
        for name, tensors in chunk.items():
            if (match := LAYER.fullmatch(name)) is not None:
                layers = max(layers, 1 + int(match[1]))
                name = f"{LAYERS}{before + int(match[1])}.{match[2]}"
            # If several stages have a tensor (tied embeddings), use the first stage's copy.
            parts.setdefault(name, tensors)
        before += layers
    return parts
