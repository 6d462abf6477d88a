"""Names of a checkpoint's tensors in the model as the trainer builds it: what it needs, and where each comes from."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from rlhf.checkpoint.interop.source import TensorInfo, TensorSource
from rlhf.errors import UserError
from rlhf.models.loading import ModelSource, load_model, load_model_config, load_value_model
from rlhf.models.model_files import FileTensor
from rlhf.models.skeleton import skeleton
from rlhf.storage.shards import DTYPE_NAMES


@dataclass(frozen=True)
class TrainedTensor:
    """Weight, or persistent buffer, of a model in training: its name in the source, its shape, and whether it is
    trained."""

    source_name: str
    info: TensorInfo
    trained: bool


def named_as_trained(source: TensorSource, path: Path, role: str) -> dict[str, TrainedTensor]:
    """The tensors that a run keeps of the model in `source`, by their names there; a `critic` has a head of one value.

    They are float32, as the trainer has them. Raises UserError, naming `path`, when the model's config is not known, or
    when `source` has not all that it asks for.
    """
    folder = source.contents.model_files
    if folder is None:
        raise UserError(
            f"{path} does not say what model it is of. Add --hf_model_path with the Hugging Face folder that its "
            "training began at (config.json and tokenizer)."
        )
    origin = ModelSource("SOURCE", str(path))
    hf_config = load_model_config(origin, folder)
    built = skeleton(partial(_model, role, origin, folder, hf_config), _as_in_files(source))
    if built is None:
        raise UserError(
            f"{path}: transformers makes the weights of {hf_config.model_type} from others than these, or its tied "
            "weights are there twice and differ. Open it with the tool that wrote it and save it with "
            "save_pretrained."
        )
    model, names = built
    heads = [name for name, _ in model.named_parameters() if name not in names]
    if heads:
        raise UserError(f"{path} has no value head ({', '.join(heads)}): it is no critic's.")
    trained = {name for name, _ in model.named_parameters()}
    tensors = {}
    for name, origin_name in names.items():
        info = source.contents.tensors[origin_name]
        dtype = torch.float32 if info.dtype.is_floating_point else info.dtype
        tensors[name] = TrainedTensor(origin_name, TensorInfo(info.shape, dtype), name in trained)
    return tensors


def _model(
    role: str, origin: ModelSource, folder: Path, hf_config: PretrainedConfig, tensors: Mapping[str, Tensor]
) -> PreTrainedModel:
    load = load_value_model if role == "critic" else load_model
    return load(origin, folder, hf_config, torch.float32, tensors)


def _as_in_files(source: TensorSource) -> dict[str, FileTensor]:
    return {name: FileTensor("", DTYPE_NAMES[info.dtype], info.shape) for name, info in source.contents.tensors.items()}
