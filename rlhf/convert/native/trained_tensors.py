"""Maps the tensors of a checkpoint to the weights and buffers of the model as the trainer builds it."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from rlhf.errors import UserError
from rlhf.models.hf.source import TensorInfo
from rlhf.models.loading import ModelSource, ModelStart, load_model, load_model_config, load_value_model
from rlhf.models.skeleton import headers_of, skeleton


@dataclass(frozen=True)
class TrainedTensor:
    """A weight or persistent buffer of the trained model: its name in the source, its shape, and whether it trains."""

    source_name: str
    info: TensorInfo
    trained: bool


def trained_tensors(
    tensors: Mapping[str, TensorInfo], model_files: Path, path: Path, role: str
) -> dict[str, TrainedTensor]:
    """Build the model in `model_files` without weights, and find each of its weights and buffers in `tensors`.

    Return them by the trainer's names. Floating-point tensors are float32, as in the trainer. A `critic` has a value
    head. Raises UserError, which names `path`, if `tensors` do not fit the model.
    """
    origin = ModelSource("SOURCE", str(path))
    hf_config = load_model_config(origin, model_files)
    load = load_value_model if role == "critic" else load_model
    built = skeleton(partial(load, ModelStart(origin, model_files, hf_config)), headers_of(tensors))
    if built is None:
        raise UserError(
            f"{path}: these tensors are not the weights that transformers uses for {hf_config.model_type}. Load the "
            "model with the tool that wrote it and save it with save_pretrained."
        )
    model, names = built
    trained = {name for name, _ in model.named_parameters()}
    if heads := trained - names.keys():
        raise UserError(f"{path} has no value head ({min(heads)}). Give a checkpoint of a critic.")
    found = {}
    for name, source_name in names.items():
        info = tensors[source_name]
        dtype = torch.float32 if info.dtype.is_floating_point else info.dtype
        found[name] = TrainedTensor(source_name, TensorInfo(info.shape, dtype), name in trained)
    return found
