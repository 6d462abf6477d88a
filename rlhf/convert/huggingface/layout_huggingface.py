"""Reads layout `huggingface`: a model's folder as on the Hub, in safetensors or in the older pickles."""

from collections.abc import Mapping
from pathlib import Path

from rlhf.convert.stored_tensor import StoredTensor, open_torch_file
from rlhf.errors import UserError
from rlhf.models.hf.named_tensors import NamedTensors
from rlhf.models.hf.safetensors_folder import (
    ABSENT,
    NAME,
    SafetensorsFolder,
    compare_with_index,
    open_safetensors,
    weight_map,
)
from rlhf.models.hf.source import Contents, Origin
from rlhf.storage.hf_layout import WEIGHTS, WEIGHTS_INDEX

PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


def recognises(origin: Origin) -> bool:
    """Return whether the folder has weights under transformers' file names."""
    return any((origin.path / name).is_file() for name in (WEIGHTS, WEIGHTS_INDEX, PICKLE, PICKLE_INDEX))


def open_source(origin: Origin) -> SafetensorsFolder | NamedTensors:
    """Open the folder's weights; safetensors take precedence over pickles."""
    path = origin.path
    if (found := open_safetensors(path, origin.model_files)) is not None:
        return found
    files = origin.model_files or path
    if (path / PICKLE_INDEX).is_file():
        return open_pickles(path, weight_map(path, PICKLE_INDEX), files)
    if (path / PICKLE).is_file():
        return open_pickles(path, {PICKLE: None}, files)
    raise UserError(
        f"{path} has no weights of a Hugging Face model ({WEIGHTS}, {PICKLE}, or the index of numbered files). Give "
        "the model's folder."
    )


def open_pickles(path: Path, listed: Mapping[str, list[str] | None], model_files: Path) -> NamedTensors:
    """Open files of `torch.save`. Tensors are read later, in ranges."""
    tensors: dict[str, StoredTensor] = {}
    files: dict[str, str] = {}
    for file in listed:
        found = open_torch_file(path / file)
        if not isinstance(found, dict) or not all(isinstance(tensor, StoredTensor) for tensor in found.values()):
            raise UserError(f"{path / file} contains more than named tensors. Save the model with save_pretrained.")
        tensors, files = tensors | found, files | dict.fromkeys(found, file)
    compare_with_index(path, listed, files)
    return NamedTensors(NAME, tensors, {}, Contents({}, model_files=model_files, absent=list(ABSENT)))
