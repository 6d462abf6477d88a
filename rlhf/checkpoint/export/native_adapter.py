"""Reads the adapters of a native checkpoint: alone with peft's settings, or merged into the run's base model."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rlhf.checkpoint.export.native_tensors import NativeTensors
from rlhf.errors import UserError
from rlhf.models.adapter_config import PREFIX, adapter_config
from rlhf.models.hf import adapters
from rlhf.models.hf.safetensors_folder import open_safetensors
from rlhf.models.hf.small_files import parse_model_config, read_small_files
from rlhf.models.hf.source import FunctionTensor, ReadableTensor, tensors_of


def adapter_in(
    checkpoint: Path, tensors: NativeTensors, settings: Mapping[str, Any], model_files: Path
) -> adapters.Adapter:
    """Return a checkpoint's weights as an adapter. `settings` are the section `model` of the checkpoint's
    configuration, `model_files` a folder with the config.json of the base."""
    own = {name.removeprefix(PREFIX): name for name in tensors.infos}
    kind = parse_model_config(read_small_files(model_files), model_files)["model_type"]
    config = adapter_config(settings["lora"], own, str(settings["path"]), kind)
    stored: dict[str, ReadableTensor] = {
        PREFIX + name: FunctionTensor(tensors.infos[full], partial(tensors.read, full)) for name, full in own.items()
    }
    return adapters.Adapter(checkpoint, config, stored)


def merged_into(base: Path, adapter: adapters.Adapter) -> dict[str, ReadableTensor]:
    """Return the tensors of the base model in `base` merged with the adapter. Raise UserError if the base has no
    safetensors, or does not fit the adapter."""
    source = open_safetensors(base)
    if source is None:
        raise UserError(
            f"{base} has no weights in safetensors (model.safetensors, or parts with an index), but the adapter needs "
            "the weights of its base model. Name a folder that has them: --hf_model_path."
        )
    return adapters.merged(tensors_of(source), adapter)
