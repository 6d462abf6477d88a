"""Lays out the weights of a Hugging Face folder as safetensors files. Imports no torch.

As on the Hub, weights up to `SHARD_BYTES` are one file; larger weights are numbered files with an index.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rlhf.storage.index_rows import Tensors
from rlhf.storage.safetensors_header import ITEM_BYTES, make_safetensors_header, nbytes_of

SHARD_BYTES = 5_000_000_000
"""Upper limit of tensor bytes in one file, unless a single tensor is larger."""
WEIGHTS, WEIGHTS_INDEX, MODEL_CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
STEM = "model"
"""Prefix of the files' names."""
GENERATION_CONFIG = "generation_config.json"
ADAPTER_STEM, ADAPTER_CONFIG = "adapter_model", "adapter_config.json"
"""File names of an adapter's weights (without suffix) and settings, as peft reads them."""
ONE_FILE = 1 << 60
"""File size limit of adapters, above any real size: peft reads an adapter from one file."""
METADATA = {"format": "pt"}
"""Metadata of each file, which some tools need to open the file."""
FLOAT_TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""Export dtypes: name in a configuration -> name in safetensors."""


@dataclass(frozen=True)
class WeightsFile:
    """Lays out one file of `size` bytes: name, header, and the first byte of each tensor, in order and without gaps."""

    name: str
    header: bytes
    first_byte: dict[str, int]
    size: int


def lay_out_weights(tensors: Tensors, shard_bytes: int | None = None, stem: str = STEM) -> list[WeightsFile]:
    """Return files for `tensors` (name -> safetensors type and shape), filled in order up to `shard_bytes` each.

    Within a file, wider types come first, as the specification requires: each tensor then begins at a multiple of its
    element size.
    """
    most = SHARD_BYTES if shard_bytes is None else shard_bytes
    groups: list[list[str]] = [[]]
    filled = 0
    for name, (dtype, shape) in tensors.items():
        nbytes = nbytes_of(dtype, shape)
        if groups[-1] and filled + nbytes > most:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += nbytes
    count = len(groups)
    numbers = [f"-{i + 1:05d}-of-{count:05d}" for i in range(count)] if count > 1 else [""]
    names = [f"{stem}{number}.safetensors" for number in numbers]
    return [_file(name, {key: tensors[key] for key in group}) for name, group in zip(names, groups, strict=True)]


def _file(name: str, tensors: Tensors) -> WeightsFile:
    ordered = dict(sorted(tensors.items(), key=lambda item: -ITEM_BYTES[item[1][0]]))
    header = make_safetensors_header(ordered, METADATA)
    first_byte, end = {}, len(header)
    for key, (dtype, shape) in ordered.items():
        first_byte[key], end = end, end + nbytes_of(dtype, shape)
    return WeightsFile(name, header, first_byte, end)


def index_of_weights(files: Iterable[WeightsFile]) -> dict[str, bytes]:
    """Return the index of numbered files as file name -> content; empty for a single file."""
    files = list(files)
    if len(files) == 1:
        return {}
    weight_map = {tensor: file.name for file in files for tensor in file.first_byte}
    total = sum(file.size - len(file.header) for file in files)
    document = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return {WEIGHTS_INDEX: (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()}


def with_dtype(small_files: Mapping[str, bytes], dtype: str | None) -> dict[str, bytes]:
    """Return `small_files` with `dtype` (float32, ...) in config.json; unchanged for None."""
    if dtype is None or MODEL_CONFIG not in small_files:
        return dict(small_files)
    config = json.loads(small_files[MODEL_CONFIG])
    config.pop("torch_dtype", None)
    config["dtype"] = dtype
    for part in config.values():  # a model with several parts has a configuration for each part
        if isinstance(part, dict) and isinstance(part.get("dtype"), str):
            part["dtype"] = dtype
    return dict(small_files) | {MODEL_CONFIG: (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()}
