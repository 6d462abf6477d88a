"""Plan of a Hugging Face folder: its tensors' types, its files, its configuration. Imports no torch."""

import json
from collections.abc import Callable, Iterable, Mapping
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
    saying_dtype,
)
from rlhf.storage.index_rows import Tensors
from rlhf.storage.shard_index import FLOATS, nbytes_of

Progress = Callable[[int], None]
"""Called with the bytes that were written since the last call."""


@dataclass(frozen=True)
class HfOptions:
    """Wishes about a Hugging Face folder.

    `dtype` (float32, ...) converts the floating point tensors; None keeps each. `shard_bytes` are the most of one file
    of weights. `tied` overrides the configuration's `tie_word_embeddings`. A `value_model` has a head of one number per
    token. `compared` says whether the tensors are compared with the architecture of the configuration, which a
    checkpoint with its own configuration does not need.
    """

    dtype: str | None = None
    shard_bytes: int | None = None
    tied: bool | None = None
    value_model: bool = False
    compared: bool = True

    def need_architecture(self, config: Mapping[str, Any]) -> bool:
        """Whether transformers has to say what it makes of `config`, which takes seconds."""
        return self.compared or self.value_model or "architectures" not in config


@dataclass(frozen=True)
class HfPlan:
    """Contents of a folder, before anything is written: its tensors with the types that they get, its small files, the
    beginning of its weights' names."""

    tensors: Tensors
    small_files: dict[str, bytes]
    shard_bytes: int | None = None
    stem: str = STEM

    @classmethod
    def of_adapter(cls, tensors: Tensors, small_files: Mapping[str, bytes]) -> "HfPlan":
        """An adapter's folder as peft reads it: one file, and no configuration of the model."""
        small = {n: content for n, content in small_files.items() if n not in (MODEL_CONFIG, GENERATION_CONFIG)}
        return cls(tensors, small, ONE_FILE, ADAPTER_STEM)

    @cached_property
    def weights(self) -> list[WeightsFile]:
        """The files of weights."""
        return lay_out_weights(self.tensors, self.shard_bytes, self.stem)

    def others(self) -> dict[str, bytes]:
        """All other files, by name."""
        return self.small_files | index_of_weights(self.weights)

    @property
    def weights_bytes(self) -> int:
        """Bytes of the files of weights."""
        return sum(file.size for file in self.weights)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(nbytes_of(kind, shape) for kind, shape in self.tensors.values())


def plan_as_stored(tensors: Tensors, model_files: Path, options: HfOptions) -> HfPlan | None:
    """The folder of tensors that stay as they are stored, with the small files of `model_files`; None when something
    has to be computed or compared for it. Raises UserError when there is no configuration."""
    small = read_small_files(model_files)
    config = parse_model_config(small, model_files)
    if options.need_architecture(config) or holds_experts(tensors) or in_dtype(tensors, options.dtype) != tensors:
        return None
    return planned(tensors, small, config, {}, options)


def holds_experts(names: Iterable[str]) -> bool:
    """Whether there are experts among weights of these names, of which files have other tensors than models."""
    return any(".experts." in name for name in names)


def planned(
    tensors: Tensors, small: Mapping[str, bytes], config: dict[str, Any], changes: dict[str, Any], options: HfOptions
) -> HfPlan:
    """The folder of tensors that have the types which they get, with `changes` of the `config` in `small`."""
    if options.tied is not None:
        changes = changes | {"tie_word_embeddings": options.tied}
    files = dict(small) | ({MODEL_CONFIG: as_json(config | changes)} if changes else {})
    return HfPlan(tensors, saying_dtype(files, _main_dtype(tensors)), options.shard_bytes)


def in_dtype(tensors: Tensors, dtype: str | None) -> dict[str, tuple[str, tuple[int, ...]]]:
    """`tensors` with floating point ones in the type `dtype` (float32, ...); None keeps each."""
    if dtype is None:
        return dict(tensors)
    return {name: (FLOAT_TYPES[dtype] if kind in FLOATS else kind, shape) for name, (kind, shape) in tensors.items()}


def as_json(document: object) -> bytes:
    """A configuration as transformers writes it."""
    return (json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def _main_dtype(tensors: Tensors) -> str | None:
    """The type that most bytes of the weights have, as configurations name it."""
    names, sizes = {kind: name for name, kind in FLOAT_TYPES.items()}, dict[str, int]()
    for kind, shape in tensors.values():
        if (name := names.get(kind)) is not None:
            sizes[name] = sizes.get(name, 0) + nbytes_of(kind, shape)
    return max(sizes, key=lambda name: sizes[name], default=None)
