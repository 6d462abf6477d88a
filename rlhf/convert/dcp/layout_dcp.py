"""Reads torch.distributed.checkpoint folders that torchtitan, accelerate with FSDP, prime-rl and others save.

Two kinds are recognised: `.metadata` with `*.distcp` files, and the safetensors of HuggingFaceStorageWriter's ranks.
The state dict may be nested (`model`, `optimizer`), or flat with the model at its top, as torchtitan saves it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from rlhf.convert.dcp.dcp_files import METADATA, DcpFolder
from rlhf.convert.dcp.dcp_safetensors import DcpSafetensors, is_sharded
from rlhf.convert.dcp.torchtitan_names import EMBEDDING, rotated_rows, to_transformers
from rlhf.convert.huggingface.layout_trainer import progress_of
from rlhf.errors import UserError, did_you_mean, nearest
from rlhf.models.hf.hf_folder import same_tensor
from rlhf.models.hf.named_tensors import NamedTensors
from rlhf.models.hf.small_files import folder_with_config, parse_model_config, read_small_files
from rlhf.models.hf.source import Contents, Origin, TensorInfo, TrainedSoFar

NAME = "dcp"
MEGATRON_FILES = ("metadata.json", "common.pt")
"""Files that only Megatron puts beside `.metadata`."""
MODEL, OPTIMIZER = ("model", "module", "state_dict"), ("optimizer", "optim", "optimizers")
"""Keys under which programs save model and optimizer in a nested state dict."""
SCHEDULE = ("lr_scheduler", "scheduler")
STEPS = (("train_state", "step"), ("progress", "step"))
"""Keys of the step in torchtitan's and in prime-rl's state dict."""
MOMENT = re.compile(r"state\.(.+)\.(exp_avg|exp_avg_sq|step)")
OF_OPTIMIZER = re.compile(r"param_groups\..+|state\..+\.(?:max_exp_avg_sq|momentum_buffer)")
"""Other names of a flattened optimizer, which may be beside the model's names (`{**model, **optimizer}`)."""
WRAPPERS = re.compile(r"(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""Parts that torch.compile, FSDP and activation checkpointing insert into parameter names."""
ACCELERATE_MODEL = re.compile(r"pytorch_model_fsdp_(\d+)")


def recognises(origin: Origin) -> bool:
    """Return whether the folder, or a folder in it, is a torch.distributed.checkpoint save that is not Megatron's."""
    try:
        return _folders(origin) is not None
    except UserError:  # saves exist, but not the requested one; `open_source` raises the error again
        return True


def open_source(origin: Origin) -> NamedTensors:
    """Open a folder, or accelerate's two folders. Raises UserError for a missing file, and for a torchtitan model that
    is unknown or lacks a config.json."""
    if (found := _folders(origin)) is None:
        raise UserError(f"{origin.path} has no {METADATA}. Give the folder of a finished DCP save.")
    path, optimizer = found
    folders = [DcpFolder(path) if _is_save(path) else DcpSafetensors(path)]
    folders += [DcpFolder(optimizer)] if optimizer is not None else []
    files = origin.model_files or folder_with_config(path, path.parent)
    weights, moments = _named(folders)
    if not weights:
        names = ", ".join(list(folders[0].tensors)[:3])
        raise UserError(f"{path} has no tensors of a model: {names or 'nothing'}. Give the folder of a model.")
    if EMBEDDING in weights:
        weights, moments = _renamed_from_torchtitan(path, files, weights, moments)
    moments = {name: tensor for name, tensor in moments.items() if name.rpartition(".")[0] in weights}
    absent = [] if moments else ["The moments: the checkpoint has none under the parameters' names."]
    source = NamedTensors(NAME, weights, moments, Contents({}, model_files=files, absent=absent))
    _drop_tied(source)
    steps = [name for name in source.contents.moments if name.endswith(".step")]
    updates = int(source.read(steps[0], 0, 1).item()) if steps else None
    source.contents.progress = _progress(folders[0], path.parent, updates)
    return source


def _is_save(folder: Path) -> bool:
    return (folder / METADATA).is_file() and not any((folder / name).exists() for name in MEGATRON_FILES)


def _folders(origin: Origin) -> tuple[Path, Path | None] | None:
    """Return the model's folder, and the optimizer's folder if there is one; None if there is no save.

    Raises UserError for an unknown tag.
    """
    path = origin.path
    if origin.tag is None and _is_save(path):
        match = ACCELERATE_MODEL.fullmatch(path.resolve().name)
        return path, _if_save(path.resolve().parent / f"optimizer_{match[1]}") if match else None
    if origin.tag is None and is_sharded(path):
        return path, None
    if origin.tag is None and _is_save(path / "pytorch_model_fsdp_0"):
        return path / "pytorch_model_fsdp_0", _if_save(path / "optimizer_0")
    saves = [folder for folder in path.glob("step-*") if folder.name[5:].isdigit() and _is_save(folder)]
    if not saves:
        return None
    names = [folder.name for folder in sorted(saves, key=lambda folder: int(folder.name[5:]))]
    if origin.tag is not None and origin.tag not in names:
        near = did_you_mean(nearest(origin.tag, names))
        raise UserError(f"--tag={origin.tag} is not in {path}. There are {', '.join(names)}.{near}")
    return path / (origin.tag or names[-1]), None


def _if_save(folder: Path) -> Path | None:
    return folder if _is_save(folder) else None


@dataclass(frozen=True)
class _FolderTensor:
    """A tensor of a folder. `head` is the number of rows per head if the rows have torchtitan's order, else 0."""

    folder: DcpFolder
    name: str
    head: int = 0

    @property
    def info(self) -> TensorInfo:
        return self.folder.tensors[self.name]

    def read(self, start: int, stop: int) -> Tensor:
        if not self.head:
            return self.folder.read(self.name, start, stop)
        # Row 2i+j of a head in torchtitan is row j*half+i in transformers.
        block = self.head * self.info.numel // self.info.shape[0]
        first, last = start // block, -(-stop // block)
        heads = self.folder.read(self.name, first * block, last * block).view(last - first, self.head // 2, 2, -1)
        return heads.transpose(1, 2).reshape(-1)[start - first * block : stop - first * block]


def _drop_tied(source: NamedTensors) -> None:
    """Drop the output embedding if the configuration ties it and its values equal the input embedding's."""
    tensors, moments, files = source.contents.tensors, source.contents.moments, source.contents.model_files
    copy, original = "lm_head.weight", "model.embed_tokens.weight"
    if files is None or copy not in tensors or tensors[copy] != tensors.get(original):
        return
    config = parse_model_config(read_small_files(files), files)
    if config.get("tie_word_embeddings") and same_tensor(source, copy, original):
        del tensors[copy]
        for name in [name for name in moments if name.startswith(f"{copy}.")]:
            del moments[name]


def _named(folders: list[DcpFolder]) -> tuple[dict[str, _FolderTensor], dict[str, _FolderTensor]]:
    """Return the model's tensors and the moments by parameter name, without the wrappers' parts."""
    found: dict[str, dict[str, _FolderTensor]] = {"nested": {}, "top": {}, "moments": {}, "other": {}}
    for folder in folders:
        for key in folder.tensors:
            kind, name = _kind(folder.paths.get(key, (key,)))
            found[kind][WRAPPERS.sub("", name)] = _FolderTensor(folder, key)
    return found["nested"] or _unwrapped(found["top"]), found["moments"]


def _kind(path: tuple[Any, ...]) -> tuple[str, str]:
    """Return the kind (nested, top, moments or other) and the name of the tensor with the keys `path`."""
    parts = [str(part) for part in path]
    if len(parts) == 1 and (first := parts[0].partition("."))[0] in OPTIMIZER:
        parts = [first[0], first[2]]
    elif len(parts) == 1 and (MOMENT.fullmatch(parts[0]) or OF_OPTIMIZER.fullmatch(parts[0])):
        parts = [OPTIMIZER[0], *parts]
    for number, part in enumerate(parts[:-1]):
        rest = ".".join(parts[number + 1 :])
        if part in OPTIMIZER:
            match = MOMENT.fullmatch(rest)
            return ("moments", f"{match[1]}.{match[2]}") if match else ("other", rest)
        if part in MODEL:
            return "nested", rest
    return ("top", parts[0]) if len(parts) == 1 else ("other", ".".join(parts))


def _unwrapped(tensors: dict[str, _FolderTensor]) -> dict[str, _FolderTensor]:
    """Remove a prefix that a wrapper has put before all names."""
    for prefix in ("module.", "model."):
        if all(name.startswith(prefix) for name in tensors) and any(n.startswith(f"{prefix}model.") for n in tensors):
            return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    return tensors


def _renamed_from_torchtitan(
    where: Path, files: Path | None, weights: Mapping[str, _FolderTensor], moments: Mapping[str, _FolderTensor]
) -> tuple[dict[str, _FolderTensor], dict[str, _FolderTensor]]:
    """Rename tensors to transformers' names and set the row order."""
    if files is None:
        raise UserError(
            f"{where} is a torchtitan checkpoint, which does not store the number of heads. Set --hf_model_path to a "
            "folder with the same model's config.json."
        )
    config = parse_model_config(read_small_files(files), files)
    renamed: dict[str, _FolderTensor] = {}
    renamed_moments: dict[str, _FolderTensor] = {}
    for name, tensor in weights.items():
        if (to := to_transformers(name, config, where)) is None:
            continue
        head = rotated_rows(to, config)
        if head and tensor.info.shape[0] % head:
            raise UserError(f"{where}: {name} has {tensor.info.shape[0]} rows, but {files} has {head} rows per head.")
        renamed[to] = replace(tensor, head=head)
        for moment in ("exp_avg", "exp_avg_sq", "step"):
            if (stored := moments.get(f"{name}.{moment}")) is not None:
                renamed_moments[f"{to}.{moment}"] = replace(stored, head=head if moment != "step" else 0)
    return renamed, renamed_moments


def _progress(folder: DcpFolder, beside: Path, updates: int | None) -> TrainedSoFar:
    """Return the step and the schedule.

    They are entries of `folder` (torchtitan, prime-rl), or else in the files of transformers' Trainer in `beside`.
    """
    trainer = progress_of(beside)
    step = trainer.step
    for key in [key for key, path in folder.paths.items() if path[-2:] in STEPS]:
        step = int(folder.read(key, 0, 1).item()) if key in folder.tensors else int(folder.read_object(key))
    schedule = {
        path[-1]: folder.read_object(key)
        for key, path in folder.paths.items()
        if path[:-1]
        and path[-2] in SCHEDULE
        and path[-1] in ("last_epoch", "base_lrs", "_last_lr")
        and key in folder.objects
    }
    return TrainedSoFar(step=step, optimizer_steps=updates, schedule=schedule or trainer.schedule)
