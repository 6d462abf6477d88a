"""Plans a Hugging Face folder: types of tensors, files, configuration. Imports no torch."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rlhf.models.hf.small_files import parse_model_config, read_small_files
from rlhf.storage.hf_layout import (
    ADAPTER_STEM,
    FLOAT_TYPES,
    GENERATION_CONFIG,
    MODEL_CONFIG,
    ONE_FILE,
    STEM,
    WeightsFile,
    index_of_weights,
    lay_out_weights,
    with_dtype,
)
from rlhf.storage.index_rows import Tensors
from rlhf.storage.safetensors_header import FLOATS, nbytes_of

SAME_IN_FILES = {
    *("falcon", "gemma", "gemma2", "gemma3_text", "gpt2", "granite", "llama", "mistral", "olmo2", "opt", "phi", "phi3"),
    *("qwen2", "qwen3", "smollm3", "stablelm", "starcoder2"),
}
"""Model types whose files store each weight as one tensor under its name in the model."""
Progress = Callable[[int], None]  # receives the number of bytes written since the last call


@dataclass(frozen=True)
class HfOptions:
    """User's options for a Hugging Face folder.

    dtype: type of the floating-point tensors (float32, ...); None keeps each type.
    shard_bytes: size limit of one weights file.
    tied: overrides the configuration's `tie_word_embeddings`.
    value_model: the head has one output per token.
    compared: whether to compare the tensors with the configuration's architecture. Not needed if the configuration is
        the checkpoint's own.
    """

    dtype: str | None = None
    shard_bytes: int | None = None
    tied: bool | None = None
    value_model: bool = False
    compared: bool = True

    def need_architecture(self, config: Mapping[str, Any]) -> bool:
        """Return whether transformers has to interpret `config`, which takes seconds."""
        return self.compared or self.value_model or "architectures" not in config


@dataclass(frozen=True)
class HfPlan:
    """Contents of a folder before writing: tensors with their final types, small files, prefix of the weights files."""

    tensors: Tensors
    small_files: dict[str, bytes]
    shard_bytes: int | None = None
    stem: str = STEM

    @classmethod
    def of_adapter(cls, tensors: Tensors, small_files: Mapping[str, bytes]) -> "HfPlan":
        """Return the plan of an adapter's folder for peft: one weights file, without the model's configuration."""
        small = {n: content for n, content in small_files.items() if n not in (MODEL_CONFIG, GENERATION_CONFIG)}
        return cls(tensors, small, ONE_FILE, ADAPTER_STEM)

    @cached_property
    def weights(self) -> list[WeightsFile]:
        return lay_out_weights(self.tensors, self.shard_bytes, self.stem)

    def others(self) -> dict[str, bytes]:
        return self.small_files | index_of_weights(self.weights)

    @property
    def weights_bytes(self) -> int:
        return sum(file.size for file in self.weights)

    @property
    def nbytes(self) -> int:
        """Return the size of the tensors in bytes, without headers."""
        return sum(nbytes_of(kind, shape) for kind, shape in self.tensors.values())


def plan_as_stored(tensors: Tensors, model_files: Path, options: HfOptions) -> HfPlan | None:
    """Return the plan for tensors that need no conversion, with the small files of `model_files`.

    Return None if a tensor has to be computed or compared.

    Raises:
        UserError: `model_files` has no valid configuration.
    """
    small = read_small_files(model_files)
    config = parse_model_config(small, model_files)
    if options.need_architecture(config) or may_rename(config) or in_dtype(tensors, options.dtype) != tensors:
        return None
    return make_plan(tensors, small, config, {}, options)


def may_rename(config: Mapping[str, Any]) -> bool:
    """Return whether the names or the number of tensors in files may differ from the model's weights.

    Return True for a model type that is not in `SAME_IN_FILES`, because only transformers knows its file format.
    """
    return config["model_type"] not in SAME_IN_FILES


def make_plan(
    tensors: Tensors, small: Mapping[str, bytes], config: dict[str, Any], changes: dict[str, Any], options: HfOptions
) -> HfPlan:
    """Return the plan for tensors in their final types.

    `config` is the parsed config.json of the files `small`; `changes` replaces entries of `config`.
    """
    if options.tied is not None:
        changes = changes | {"tie_word_embeddings": options.tied}
    files = dict(small) | ({MODEL_CONFIG: as_json(config | changes)} if changes else {})
    return HfPlan(tensors, with_dtype(files, _main_dtype(tensors)), options.shard_bytes)


def in_dtype(tensors: Tensors, dtype: str | None) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return `tensors` with floating-point types changed to `dtype` (float32, ...); None keeps each type."""
    if dtype is None:
        return dict(tensors)
    return {name: (FLOAT_TYPES[dtype] if kind in FLOATS else kind, shape) for name, (kind, shape) in tensors.items()}


def as_json(document: object) -> bytes:
    """Return a configuration as transformers writes it."""
    return (json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def _main_dtype(tensors: Tensors) -> str | None:
    """Return the floating-point type with the most bytes, by its name in configurations; None without such tensors."""
    names, sizes = {kind: name for name, kind in FLOAT_TYPES.items()}, dict[str, int]()
    for kind, shape in tensors.values():
        if (name := names.get(kind)) is not None:
            sizes[name] = sizes.get(name, 0) + nbytes_of(kind, shape)
    return max(sizes, key=lambda name: sizes[name], default=None)
