"""Reads layout `megatron`, distributed: a folder of megatron-core's `dist_checkpointing` in its format `torch_dist`.

The folder is a torch.distributed.checkpoint of whole tensors under Megatron's names, independent of the ranks that
wrote it. One tensor stacks a parameter of all layers, or each layer has separate tensors with its number.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

from rlhf.convert.dcp.dcp_files import LARGEST, METADATA, DcpFolder
from rlhf.convert.megatron.dist_optimizer import read_optimizer
from rlhf.convert.megatron.megatron_names import as_transformers, find_model, has_value_head
from rlhf.convert.megatron.megatron_paths import find_folder
from rlhf.convert.megatron.torch_dist_tensors import by_layer, stored_tensor
from rlhf.errors import UserError
from rlhf.models.hf.named_tensors import NamedTensors
from rlhf.models.hf.source import Origin
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.reading import read_regular

NAME = "megatron"
CONFIG = "metadata.json"
FORMAT = "torch_dist"
NOT_MODEL = ("optimizer.", "chained_", "rng_state", "rerun_state_machine_state")
"""Prefixes of the names of tensors that are not the model's."""


def recognises(origin: Origin) -> bool:
    """Return whether `dist_checkpointing` wrote the folder or one in it, such as `actor` (see `find_folder`)."""
    return find_folder(origin, _is_distributed) is not None


def open_source(origin: Origin) -> NamedTensors:
    """Open the model; raises UserError for a missing file, or a format other than `torch_dist`."""
    path = find_folder(origin, _is_distributed)
    if path is None:
        raise UserError(f"{origin.path / (origin.tag or '')} has no {CONFIG} of megatron-core. Give a folder with it.")
    if (backend := _config(path)["sharded_backend"]) != FORMAT:
        raise UserError(f"{path} has Megatron's format {backend}. Save it with --dist-ckpt-format {FORMAT}.")
    folder = DcpFolder(path)
    weights = {name: stored_tensor(folder, name) for name in folder.tensors if not name.startswith(NOT_MODEL)}
    if not weights:
        raise UserError(
            f"{path / METADATA} lists no model tensors. Save it again with the model (checkpoint.contents)."
        )
    parts = by_layer(weights)
    model, model_files = find_model(origin, path, values=has_value_head(parts))
    return as_transformers(model, parts, path, model_files, partial(read_optimizer, folder, weights))


def _is_distributed(folder: Path) -> bool:
    return "sharded_backend" in _config(folder)


def _config(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_regular(folder / CONFIG, LARGEST))
    except (DamagedCheckpoint, OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
