"""Reads layout `megatron`, distributed: a folder of megatron-core's `dist_checkpointing` in its format `torch_dist`.

The folder is a torch.distributed.checkpoint of whole tensors under Megatron's names, independent of the ranks that
wrote it. The layers are stacked in one tensor, or each layer has names of its own.
"""

import json
from pathlib import Path
from typing import Any

from rlhf.convert.dcp.dcp_files import LARGEST, METADATA, DcpFolder
from rlhf.convert.megatron.megatron_model import LAYERS
from rlhf.convert.megatron.megatron_names import as_transformers, find_model, has_value_head
from rlhf.convert.megatron.megatron_paths import find_folder
from rlhf.errors import UserError
from rlhf.models.hf.named_tensors import JoinedTensor, NamedTensors
from rlhf.models.hf.source import FunctionTensor, Origin, ReadableTensor, TensorInfo
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.reading import read_regular

NAME = "megatron"
CONFIG = "metadata.json"
FORMAT = "torch_dist"
NOT_MODEL = ("optimizer.", "chained_", "rng_state", "rerun_state_machine_state")
"""Prefixes of the names of tensors that are not the model's."""
GATE, UP = "_w", "_v"
"""Suffixes of the two halves of `linear_fc1`, if the folder has them as separate tensors."""


def recognises(origin: Origin) -> bool:
    """Return whether `dist_checkpointing` wrote the folder, or the role's folder in it."""
    return find_folder(origin, _is_distributed) is not None


def open_source(origin: Origin) -> NamedTensors:
    """Open the model; raises UserError for a missing file, or a format other than `torch_dist`."""
    path = find_folder(origin, _is_distributed)
    if path is None:
        raise UserError(f"{origin.path / (origin.tag or '')} has no {CONFIG} of megatron-core. Give its folder.")
    if (backend := _config(path)["sharded_backend"]) != FORMAT:
        raise UserError(f"{path} has Megatron's format {backend}. Save it with --dist-ckpt-format {FORMAT}.")
    folder = DcpFolder(path)
    parts = _model_tensors(folder)
    if not parts:
        raise UserError(
            f"{path / METADATA} lists no model tensors. Save it again with the model (checkpoint.contents)."
        )
    model, model_files = find_model(origin, path, values=has_value_head(parts))
    return as_transformers(model, parts, path, model_files)


def _is_distributed(folder: Path) -> bool:
    return "sharded_backend" in _config(folder)


def _config(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_regular(folder / CONFIG, LARGEST))
    except (DamagedCheckpoint, OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _model_tensors(folder: DcpFolder) -> dict[str, list[ReadableTensor]]:
    parts: dict[str, list[ReadableTensor]] = {}
    for name, info in folder.tensors.items():
        rest = name.removeprefix(LAYERS)
        if name.startswith(NOT_MODEL):
            continue
        if rest == name or rest.partition(".")[0].isdigit():
            parts[name] = [_part(folder, name, info)]
            continue
        one = TensorInfo(info.shape[1:], info.dtype)
        for layer in range(info.shape[0]):
            parts[f"{LAYERS}{layer}.{rest}"] = [_part(folder, name, one, layer * one.numel)]
    for name in [name for name in parts if name.endswith(GATE) and name.removesuffix(GATE) + UP in parts]:
        _join_halves(parts, name.removesuffix(GATE))
    return parts


def _part(folder: DcpFolder, name: str, info: TensorInfo, first: int = 0) -> FunctionTensor:
    """Return the tensor that begins at element `first` of the folder's tensor `name`."""
    return FunctionTensor(info, lambda start, stop: folder.read(name, first + start, first + stop))


def _join_halves(parts: dict[str, list[ReadableTensor]], name: str) -> None:
    halves = [parts.pop(name + GATE)[0], parts.pop(name + UP)[0]]
    (_, *rest), dtype = halves[0].info.shape, halves[0].info.dtype
    info = TensorInfo((sum(half.info.shape[0] for half in halves), *rest), dtype)
    parts[name] = [JoinedTensor(info, [(half, 0, half.info.numel) for half in halves])]
