"""Reads layout `huggingface`: a model's folder as on the Hub, in safetensors or in the older pickles."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from rlhf.convert.pickles import read_pickle
from rlhf.errors import UserError
from rlhf.models.hf.safetensors_folder import (
    ABSENT,
    NAME,
    SafetensorsFolder,
    compare_with_index,
    open_safetensors,
    weight_map,
)
from rlhf.models.hf.source import Contents, Origin, TensorInfo
from rlhf.storage.hf_layout import WEIGHTS, WEIGHTS_INDEX

PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


def recognises(origin: Origin) -> bool:
    """Return whether the folder has weights under transformers' file names."""
    return any((origin.path / name).is_file() for name in (WEIGHTS, WEIGHTS_INDEX, PICKLE, PICKLE_INDEX))


def open_source(origin: Origin) -> "SafetensorsFolder | PickleFolder":
    """Open the folder's weights; safetensors come before pickles."""
    path = origin.path
    if (found := open_safetensors(path, origin.model_files)) is not None:
        return found
    files = origin.model_files or path
    if (path / PICKLE_INDEX).is_file():
        return PickleFolder(path, weight_map(path, PICKLE_INDEX), files)
    if (path / PICKLE).is_file():
        return PickleFolder(path, {PICKLE: None}, files)
    raise UserError(
        f"{path} has no weights of a Hugging Face model ({WEIGHTS}, {PICKLE}, or the index of numbered files). Give "
        "the model's folder."
    )


class PickleFolder:
    """Reads a folder of `torch.save` files; one file at a time is mapped into memory."""

    layout = NAME

    def __init__(self, path: Path, listed: Mapping[str, list[str] | None], model_files: Path) -> None:
        self._path, self._open = path, ("", dict[str, Tensor]())
        self._files: dict[str, str] = {}
        tensors = {}
        for file in listed:
            for name, tensor in self._of(file).items():
                self._files[name], tensors[name] = file, TensorInfo(tuple(tensor.shape), tensor.dtype)
        compare_with_index(path, listed, self._files)
        self.contents = Contents(tensors, model_files=model_files, absent=list(ABSENT))

    def _of(self, file: str) -> dict[str, Tensor]:
        if self._open[0] != file:
            found = read_pickle(self._path / file)
            if not isinstance(found, dict) or not all(isinstance(tensor, Tensor) for tensor in found.values()):
                raise UserError(f"{self._path / file} does not contain named tensors only.")
            self._open = file, found
        return self._open[1]

    def read(self, name: str, start: int, stop: int) -> Tensor:
        return self._of(self._files[name])[name].reshape(-1)[start:stop].clone()

    def close(self) -> None:
        self._open = "", {}
