"""Writer of Hugging Face folders from any open checkpoint; no more than a few ranges of tensors are in memory."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlhf.checkpoint.interop.small_files import parse_model_config, read_small_files
from rlhf.checkpoint.interop.source import TensorInfo, TensorSource
from rlhf.errors import UserError
from rlhf.storage.files import WrittenFile, write_file
from rlhf.storage.hf_layout import (
    MODEL_CONFIG,
    STEM,
    WeightsFile,
    index_of_weights,
    lay_out_weights,
    saying_dtype,
)
from rlhf.storage.shards import DTYPE_NAMES, as_bytes

T = TypeVar("T")
ADAPTER, ADAPTER_CONFIG = "adapter_model", "adapter_config.json"
ONE_FILE = 1 << 60
"""Bytes that no adapter has, which peft reads from one file."""
RANGE_BYTES = 8 << 20
"""Bytes of a tensor that are read at a time. Larger ones cost more: the C library takes memory for them from the system
anew each time, and clearing its pages takes longer than reading."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Types that weights can be written in, by the names that configurations have for them."""

log = logging.getLogger(__name__)
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


@dataclass(frozen=True)
class HfPlan:
    """Contents of a folder, before anything is written: its tensors with the types that they get, its small files, the
    beginning of its weights' names."""

    tensors: dict[str, TensorInfo]
    small_files: dict[str, bytes]
    shard_bytes: int | None = None
    stem: str = STEM

    def files(self) -> list[WeightsFile]:
        """The files of weights."""
        table = {name: (DTYPE_NAMES[info.dtype], info.shape) for name, info in self.tensors.items()}
        return lay_out_weights(table, self.shard_bytes, self.stem)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(info.nbytes for info in self.tensors.values())


def plan_hf_folder(source: TensorSource, where: Path, options: HfOptions) -> HfPlan:
    """The folder that becomes of an open checkpoint, which the user knows as `where`.

    Raises UserError when the configuration is not there or does not fit the tensors, DamagedCheckpoint when tied
    tensors, which are compared, cannot be read.
    """
    contents = source.contents
    if contents.model_files is None:
        raise UserError(f"{where} does not bring its model's config and tokenizer. Name a folder with --hf_model_path.")
    small = read_small_files(contents.model_files)
    tensors = dict(contents.tensors)
    if odd := next((name for name, info in tensors.items() if info.dtype not in DTYPE_NAMES), None):
        raise UserError(f"{where}: {odd} has the type {tensors[odd].dtype}, which is not written here.")
    if contents.adapter is not None:
        small = {name: text for name, text in small.items() if name not in (MODEL_CONFIG, "generation_config.json")}
        small[ADAPTER_CONFIG] = _json(contents.adapter)
        return HfPlan(_converted(tensors, options.dtype), small, ONE_FILE, ADAPTER)
    config = parse_model_config(small, contents.model_files)
    changes: dict[str, Any] = {} if options.tied is None else {"tie_word_embeddings": options.tied}
    if options.compared or options.value_model or "architectures" not in config:
        # With transformers, which takes seconds.
        from rlhf.checkpoint.interop.huggingface.architecture import architecture_of, check_fit

        found = architecture_of(contents.model_files, value_model=options.value_model, tied=options.tied)
        if found is not None:
            for name, origin in found.tied.items():
                if name in tensors and origin in tensors:
                    _require_equal(source, where, name, origin)
                    del tensors[name]
            # The files of a checkpoint's own configuration lie in a scratch folder, which nobody knows.
            named = contents.model_files if options.compared else where
            check_fit(where, tensors, found, named, options.value_model)
            changes["architectures"] = [found.name]
    if options.value_model:
        changes |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "classifier_dropout": 0.0}
        config.pop("num_labels", None)
    if changes:
        small[MODEL_CONFIG] = _json(config | changes)
    written = _converted(tensors, options.dtype)
    return HfPlan(written, saying_dtype(small, _main_dtype(written)), options.shard_bytes)


def write_hf_folder(
    source: TensorSource, plan: HfPlan, folder: Path, progress: Progress = lambda count: None
) -> list[WrittenFile]:
    """Write a planned folder into the empty `folder`; returns what was written, with hashes of the memory that was."""
    files = plan.files()
    written = [write_file(folder, file.name, _chunks(source, plan, file, progress)) for file in files]
    for name, content in (plan.small_files | index_of_weights(files)).items():
        written.append(write_file(folder, name, [content]))
    return written


def ranges_of(tensors: Mapping[str, TensorInfo]) -> Iterator[tuple[str, int, int]]:
    """Ranges of RANGE_BYTES that cover every tensor: name, first element, end."""
    for name, info in tensors.items():
        step = max(1, RANGE_BYTES // info.dtype.itemsize)
        for start in range(0, info.numel, step):
            yield name, start, min(start + step, info.numel)


def same_tensor(source: TensorSource, name: str, other: str) -> bool:
    """Whether two tensors of a checkpoint are equal."""
    tensors = source.contents.tensors
    return tensors[name] == tensors[other] and all(
        torch.equal(source.read(name, start, stop), source.read(other, start, stop))
        for _, start, stop in ranges_of({name: tensors[name]})
    )


def converted(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor`, of the weight `name`, in another type; raises UserError for numbers that float16 does not have."""
    result = tensor.to(dtype)
    if dtype == torch.float16 and result is not tensor and bool((result.isinf() & tensor.isfinite()).any()):
        raise UserError(
            f"{name} has values beyond 65504, which float16 does not have. Take bfloat16 (--dtype, or "
            "checkpoint.hf_dtype of a run)."
        )
    return result


def one_ahead(items: Iterator[T]) -> Iterator[T]:
    """The same items, each made in another thread while the one before it is in use."""
    end: Any = object()
    with ThreadPoolExecutor(1) as beside:
        following = beside.submit(next, items, end)
        while (item := following.result()) is not end:
            following = beside.submit(next, items, end)
            yield item


def _chunks(source: TensorSource, plan: HfPlan, file: WeightsFile, progress: Progress) -> Iterator[bytes | memoryview]:
    yield file.header
    stored = {name: source.contents.tensors[name] for name in file.first_byte}

    def read() -> Iterator[Tensor]:
        for name, start, stop in ranges_of(stored):
            yield converted(name, source.read(name, start, stop), plan.tensors[name].dtype)

    for tensor in one_ahead(read()):
        yield as_bytes(tensor)
        progress(tensor.nbytes)


def _converted(tensors: Mapping[str, TensorInfo], dtype: str | None) -> dict[str, TensorInfo]:
    if dtype is None:
        return dict(tensors)
    return {
        name: TensorInfo(info.shape, DTYPES[dtype] if info.dtype.is_floating_point else info.dtype)
        for name, info in tensors.items()
    }


def _main_dtype(tensors: Mapping[str, TensorInfo]) -> str | None:
    """The type that most bytes of the weights have, as configurations name it."""
    names, sizes = {dtype: name for name, dtype in DTYPES.items()}, dict[str, int]()
    for info in tensors.values():
        if (name := names.get(info.dtype)) is not None:
            sizes[name] = sizes.get(name, 0) + info.nbytes
    return max(sizes, key=lambda name: sizes[name], default=None)


def _require_equal(source: TensorSource, where: Path, name: str, origin: str) -> None:
    if not same_tensor(source, name, origin):
        raise UserError(
            f"{where}: {name} and {origin} differ, and the configuration says that they are one. Name "
            "the model's own folder with --hf_model_path, or keep both: merge takes it with --no-tie-word-embedding."
        )


def _json(document: object) -> bytes:
    return (json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()
