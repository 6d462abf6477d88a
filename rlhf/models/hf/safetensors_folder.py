"""Opens a Hugging Face folder of safetensors files as a checkpoint, and reads ranges of tensors."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from rlhf.errors import UserError
from rlhf.models.hf.small_files import parse_model_config
from rlhf.models.hf.source import Contents, TensorInfo
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.hf_layout import MODEL_CONFIG, WEIGHTS, WEIGHTS_INDEX
from rlhf.storage.reading import UnverifiedFiles
from rlhf.storage.safetensors_header import read_safetensors_header
from rlhf.storage.shards import DTYPES, Shard, TensorReader

NAME = "huggingface"
ABSENT = ["the optimizer's moments", "the step and the learning rate schedule"]


def open_safetensors(path: Path, model_files: Path | None = None) -> "SafetensorsFolder | None":
    """Open the folder `path`, with config and tokenizer from `model_files` or `path`; return None without safetensors.

    Raises:
        UserError: the weights are quantized or of an unsupported type, or a file of the index is missing.
        DamagedCheckpoint: a file is cut off, or does not fit the index.
    """
    check_not_quantized(path)
    if (path / WEIGHTS_INDEX).is_file():
        return SafetensorsFolder(path, weight_map(path, WEIGHTS_INDEX), model_files or path)
    if (path / WEIGHTS).is_file():
        return SafetensorsFolder(path, {WEIGHTS: None}, model_files or path)
    return None


def check_not_quantized(path: Path) -> None:
    """Raise UserError if config.json in `path` describes quantized weights."""
    if not (path / MODEL_CONFIG).is_file():
        return
    if "quantization_config" in parse_model_config({MODEL_CONFIG: (path / MODEL_CONFIG).read_bytes()}, path):
        raise UserError(f"{path} is quantized ({MODEL_CONFIG}). Name the folder with the weights before quantization.")


def weight_map(path: Path, index: str) -> dict[str, list[str] | None]:
    """Return the tensor names of each weights file that the index lists.

    Raises:
        UserError: a weights file is missing.
        DamagedCheckpoint: the index is invalid.
    """
    try:
        entries = json.loads((path / index).read_bytes())["weight_map"]
        files: dict[str, list[str] | None] = {}
        for name, file in entries.items():
            if Path(file).name != file:
                raise ValueError(f"{file} is in another folder")
            files[file] = [*(files.get(file) or ()), name]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path / index} is not an index of weights: {error}") from None
    if missing := [file for file in files if not (path / file).is_file()]:
        raise UserError(f"{path} lacks {', '.join(missing)}, which {index} lists. Restore the missing files.")
    return files


def compare_with_index(path: Path, listed: Mapping[str, list[str] | None], found: Mapping[str, str]) -> None:
    """Raise DamagedCheckpoint unless every tensor in the index is in the file that the index names."""
    for file, names in listed.items():
        for name in names or ():
            if found.get(name) != file:
                raise DamagedCheckpoint(f"{path / file} lacks {name}, which the index lists for this file")


class SafetensorsFolder:
    """An open folder of safetensors files; reads ranges only."""

    layout = NAME

    def __init__(self, path: Path, listed: Mapping[str, list[str] | None], model_files: Path) -> None:
        self._path = path.resolve()
        folder = self._path.name
        files = UnverifiedFiles(self._path.parent, [f"{folder}/{file}" for file in listed])
        found: dict[str, str] = {}
        for file in listed:
            header, length = read_safetensors_header(files, f"{folder}/{file}")
            if odd := next((entry["dtype"] for entry in header.values() if entry["dtype"] not in DTYPES), None):
                raise UserError(
                    f"{path / file} has tensors of type {odd}, which is not supported. Name a folder of "
                    f"weights in {', '.join(DTYPES)}."
                )
            end = length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
            if (size := files.size(f"{folder}/{file}")) != end:
                raise DamagedCheckpoint(f"{path / file} has {size} bytes, its header needs {end}: the file is cut off")
            found |= dict.fromkeys(header, file)
        compare_with_index(path, listed, found)
        self._reader = TensorReader.of_whole_tensors(files, folder, listed)
        tensors = {name: TensorInfo(shape, DTYPES[dtype]) for name, (dtype, shape) in self._reader.tensors.items()}
        self.contents = Contents(tensors, model_files=model_files, absent=list(ABSENT))

    def read(self, name: str, start: int, stop: int) -> Tensor:
        info = self.contents.tensors[name]
        result = torch.empty(stop - start, dtype=info.dtype)
        self._reader.read_into({name: Shard(info.shape, (start,), result)})
        return result

    def close(self) -> None:
        """Do nothing: no file is open between reads."""
