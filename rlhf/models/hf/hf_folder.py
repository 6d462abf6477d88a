"""Writer of Hugging Face folders from any open checkpoint; no more than a few ranges of tensors are in memory."""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlhf.errors import UserError
from rlhf.models.hf.adapters import choose, is_adapted
from rlhf.models.hf.hf_plan import HfOptions, HfPlan, Progress, as_json, in_dtype, planned
from rlhf.models.hf.small_files import parse_model_config, read_small_files
from rlhf.models.hf.source import TensorInfo, TensorSource
from rlhf.storage.files import WrittenFile, write_file
from rlhf.storage.hf_layout import ADAPTER_CONFIG, ADAPTER_STEM, GENERATION_CONFIG, MODEL_CONFIG, ONE_FILE, WeightsFile
from rlhf.storage.index_rows import Tensors
from rlhf.storage.shards import DTYPE_NAMES, DTYPES, as_bytes

T = TypeVar("T")
RANGE_BYTES = 8 << 20
"""Bytes of a tensor that are read at a time. Larger ones cost more: the C library takes memory for them from the system
anew each time, and clearing its pages takes longer than reading."""


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
    if contents.adapter is None and is_adapted(tensors):
        choose(None, where)
    if contents.adapter is not None:
        small = {name: text for name, text in small.items() if name not in (MODEL_CONFIG, GENERATION_CONFIG)}
        small[ADAPTER_CONFIG] = as_json(contents.adapter)
        return HfPlan(in_dtype(_table(tensors), options.dtype), small, ONE_FILE, ADAPTER_STEM)
    config = parse_model_config(small, contents.model_files)
    changes: dict[str, Any] = {}
    if options.need_architecture(config):
        # With transformers, which takes seconds.
        from rlhf.models.hf.architecture import architecture_of, check_fit

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
    return planned(in_dtype(_table(tensors), options.dtype), small, config, changes, options)


def write_hf_folder(
    source: TensorSource, plan: HfPlan, folder: Path, progress: Progress = lambda count: None
) -> list[WrittenFile]:
    """Write a planned folder into the empty `folder`; returns what was written, with hashes of the memory that was."""
    written = [write_file(folder, file.name, _chunks(source, plan, file, progress)) for file in plan.weights()]
    return written + [write_file(folder, name, [content]) for name, content in plan.others().items()]


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
            yield converted(name, source.read(name, start, stop), DTYPES[plan.tensors[name][0]])

    for tensor in one_ahead(read()):
        yield as_bytes(tensor)
        progress(tensor.nbytes)


def _table(tensors: Mapping[str, TensorInfo]) -> Tensors:
    return {name: (DTYPE_NAMES[info.dtype], info.shape) for name, info in tensors.items()}


def _require_equal(source: TensorSource, where: Path, name: str, origin: str) -> None:
    if not same_tensor(source, name, origin):
        raise UserError(
            f"{where}: {name} and {origin} differ, and the configuration says that they are one. Name "
            "the model's own folder with --hf_model_path, or keep both: merge takes it with --no-tie-word-embedding."
        )
