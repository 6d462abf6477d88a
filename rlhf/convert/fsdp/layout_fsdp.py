"""Reads layout `fsdp`: verl's checkpoints of FSDP1 and FSDP2, one file per rank.

A folder (verl's `global_step_N/actor` or `critic`) has `model_world_size_W_rank_R.pt` of every rank R. Usually it also
has `optim_...` and `extra_state_...`, `fsdp_config.json`, and in `huggingface/` the model's config and tokenizer. With
a LoRA adapter, it also has `lora_train_meta.json`.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf.convert.fsdp.fsdp_files import (
    ALLOWED,
    EXTRA,
    MODEL,
    OPTIMIZER,
    fields_of,
    find_folder,
    open_ranks,
    paths_of,
    world_size_of,
)
from rlhf.convert.fsdp.fsdp_moments import read_moments
from rlhf.convert.fsdp.fsdp_tensors import DTensorPart, ReplicatedTensor, assemble
from rlhf.convert.huggingface import layout_huggingface
from rlhf.convert.moments import Unmapped, with_updates
from rlhf.convert.stored_tensor import StoredTensor, StoredWrapper, open_mapping
from rlhf.errors import UserError
from rlhf.models.hf import adapters
from rlhf.models.hf.architecture import architecture_of
from rlhf.models.hf.named_tensors import NamedTensors
from rlhf.models.hf.small_files import LARGEST, folder_with_config
from rlhf.models.hf.source import Contents, Origin, ReadableTensor, TrainedSoFar, tensors_of
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.layout import step_of
from rlhf.storage.reading import parse_json, read_regular

NAME = "fsdp"
MODEL_FILES = "huggingface"
LORA_META = "lora_train_meta.json"
WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_fsdp_wrapped_module|_orig_mod|_checkpoint_wrapped_module)\.")


def recognises(origin: Origin) -> bool:
    """Return whether the folder, or the role's folder in it, has a file of a rank's model."""
    return find_folder(origin) is not None


def open_source(origin: Origin) -> NamedTensors:
    """Open a checkpoint. Raises UserError for a missing file, files of several saves, and an adapter without
    `--adapter`."""
    folder = find_folder(origin)
    if folder is None:
        raise UserError(
            f"{origin.path} and its folder {origin.role} have no {MODEL}_world_size_W_rank_R.pt. Give a role's folder "
            "of a step of verl, such as global_step_100/actor."
        )
    world_size = world_size_of(folder)
    ranks = [{WRAPPERS.sub("", name): part for name, part in rank.items()} for rank in open_ranks(folder, world_size)]
    model_files = origin.model_files or folder_with_config(folder / MODEL_FILES)
    contents = Contents({}, model_files=model_files, progress=_progress(folder, world_size))
    if contents.progress.schedule is None:
        contents.absent.append(f"the learning rate schedule: no {EXTRA} file has one")
    contents.absent.append(
        "the position in the training data and the state of the algorithm: only verl can read its data.pt"
    )
    tensors = _tensors(folder, ranks)
    if adapters.is_adapted(tensors):
        contents.absent.append("the optimizer's moments: they belong to the adapter's weights")
        return NamedTensors(NAME, _adapted(folder, origin, tensors, contents), {}, contents)
    tied = _tied(ranks[0], model_files)
    tensors = {name: tensor for name, tensor in tensors.items() if name not in tied}
    return NamedTensors(NAME, tensors, _moments(folder, ranks, tensors, contents), contents)


def _tensors(folder: Path, ranks: Sequence[Mapping[str, Any]]) -> dict[str, ReadableTensor]:
    if any(name.endswith("_flat_param") for name in ranks[0]):
        raise UserError(f"{folder} has FSDP1's flattened weights (LOCAL_STATE_DICT). Save it with SHARDED_STATE_DICT.")
    for number, rank in enumerate(ranks):
        if odd := next(iter(sorted(map(str, rank.keys() ^ ranks[0].keys()))), None):
            raise DamagedCheckpoint(f"{folder}: only one of the files of ranks 0 and {number} has {odd}")
    return {name: assemble(name, [rank[name] for rank in ranks]) for name in ranks[0]}


def _tied(rank: Mapping[str, Any], model_files: Path | None) -> set[str]:
    """Return the names of tied copies. FSDP2 stores the bytes of a tensor and its copy once, FSDP1 twice."""
    names = {name for name, other in _tied_by_config(model_files).items() if name in rank and other in rank}
    first_names: dict[Any, str] = {}
    for name, part in rank.items():
        wraps = isinstance(part, StoredWrapper) and part.kind == "DTensor"
        stored = fields_of(part)["_local_tensor"] if wraps else part
        if isinstance(stored, StoredTensor) and stored.numel and first_names.setdefault(stored, name) != name:
            names.add(name)
    return names


def _tied_by_config(model_files: Path | None) -> dict[str, str]:
    architecture = None if model_files is None else architecture_of(model_files)
    return {} if architecture is None else architecture.tied


def _moments(
    folder: Path, ranks: Sequence[Mapping[str, Any]], tensors: Mapping[str, ReadableTensor], contents: Contents
) -> dict[str, ReadableTensor]:
    split = [name for name, tensor in tensors.items() if not isinstance(tensor, ReplicatedTensor)]
    parameters = {name: tensors[name].info.shape for name in split or tensors}
    try:
        found = read_moments(folder, len(ranks), parameters, _shard_ranks(ranks, split))
    except Unmapped as reason:
        contents.absent.insert(0, f"the optimizer's moments: {reason}")
        return {}
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise DamagedCheckpoint(
            f"{folder}: the files {OPTIMIZER}_* do not have FSDP's structure: {error!r}. Copy them again, or remove "
            "them to start without moments."
        ) from None
    if idle := [name for name in parameters if f"{name}.step" not in found]:
        contents.absent.insert(0, f"the moments of {', '.join(idle[:3])}: never updated ({len(idle)} in all)")
    contents.progress = with_updates(contents.progress, found)
    return found


def _shard_ranks(ranks: Sequence[Mapping[str, Any]], split: Sequence[str]) -> list[int]:
    """Return the ranks whose parts together form one copy of the model, in the order of the parts."""
    if not split:  # each rank has the whole model
        return [0]
    parts = [rank[split[0]] for rank in ranks]
    if not all(isinstance(part, StoredWrapper) and part.kind == "DTensor" for part in parts):
        return list(range(len(ranks)))
    placed = [DTensorPart.of(part, split[0]) for part in parts]
    return [rank for _, rank in sorted((part.coordinates, r) for r, part in enumerate(placed) if not part.is_copy)]


def _progress(folder: Path, world_size: int) -> TrainedSoFar:
    step = step_of(folder) or step_of(folder.resolve().parent)
    path = paths_of(folder, EXTRA, world_size)[0]
    if not path.is_file():
        return TrainedSoFar(step)
    schedule = open_mapping(path, ALLOWED, "verl").get("lr_scheduler")
    return TrainedSoFar(step, schedule=dict(schedule) if isinstance(schedule, dict) else None)


def _adapted(
    folder: Path, origin: Origin, tensors: Mapping[str, ReadableTensor], contents: Contents
) -> dict[str, ReadableTensor]:
    choice = adapters.adapter_choice(origin.adapter, folder)
    base, factors = adapters.split_adapter(tensors, folder)
    adapter = adapters.Adapter(folder, _adapter_config(folder, factors, origin), factors)
    if choice == adapters.KEEP:
        contents.adapter = adapter.config
        return factors
    if not base:
        if origin.model_files is None:
            raise UserError(
                f"{folder} has an adapter and no base model (save_lora_only). Set --hf_model_path to the base model."
            )
        base = tensors_of(layout_huggingface.open_source(Origin(origin.model_files)))
    tied = _tied_by_config(contents.model_files)
    return adapters.merged({name: tensor for name, tensor in base.items() if name not in tied}, adapter)


def _adapter_config(folder: Path, factors: Mapping[str, Any], origin: Origin) -> dict[str, Any]:
    """Return the content of adapter_config.json; verl saves only rank, alpha and task type."""
    path = folder / LORA_META
    try:
        meta = parse_json(read_regular(path, LARGEST), LORA_META)
        rank, alpha = int(meta["r"]), int(meta["lora_alpha"])
    except FileNotFoundError:
        raise UserError(
            f"{folder} lacks {LORA_META} with the adapter's scale. Write it with the values of the old run, such as "
            '{"r": 8, "lora_alpha": 16, "task_type": "CAUSAL_LM"}.'
        ) from None
    except (DamagedCheckpoint, ValueError, KeyError, TypeError):
        raise DamagedCheckpoint(f"{path} lacks r or lora_alpha") from None
    modules = {match[1].rpartition(".")[2] for name in factors if (match := adapters.FACTOR.fullmatch(name))}
    base = str(origin.model_files) if origin.model_files else None
    return {
        "peft_type": "LORA",
        "task_type": meta.get("task_type"),
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted(modules),
        "bias": "none",
        "inference_mode": True,
    }
