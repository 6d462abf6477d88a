"""Plans the Hugging Face folder of any open checkpoint, and reads and converts its tensors in ranges."""

from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from rlhf.errors import UserError
from rlhf.models.hf.adapters import adapter_choice, is_adapted
from rlhf.models.hf.hf_plan import HfOptions, HfPlan, as_json, in_dtype, make_plan, may_rename
from rlhf.models.hf.small_files import parse_model_config, read_small_files
from rlhf.models.hf.source import TensorInfo, TensorSource
from rlhf.storage.hf_layout import ADAPTER_CONFIG
from rlhf.storage.index_rows import Tensors
from rlhf.storage.shards import DTYPE_NAMES

if TYPE_CHECKING:
    from rlhf.models.hf.architecture import Architecture

T = TypeVar("T")
RANGE_BYTES = 8 << 20
"""Bytes of a tensor per read. For larger reads the C library allocates fresh pages each time, and clearing the pages
takes longer than reading."""


class PlannedFolder(NamedTuple):
    """A planned Hugging Face folder of an open checkpoint.

    source: the checkpoint with the names and tensors of the folder.
    tied: the checkpoint's tied copies, which the folder lacks.
    """

    plan: HfPlan
    source: TensorSource
    tied: Collection[str] = ()


def plan_hf_folder(source: TensorSource, where: Path, options: HfOptions) -> PlannedFolder:
    """Plan the Hugging Face folder of an open checkpoint; messages name its path `where`.

    Raises:
        UserError: the configuration is missing or does not fit the tensors; tied tensors differ; a tensor has a type
            that cannot be exported; or the user must choose what to do with an adapter.
        DamagedCheckpoint: tied tensors, which are read and compared, cannot be read.
    """
    contents = source.contents
    if contents.model_files is None:
        raise UserError(f"{where} has no config and tokenizer of its model. Name a folder with --hf_model_path.")
    small = read_small_files(contents.model_files)
    tensors = dict(contents.tensors)
    if odd := next((name for name, info in tensors.items() if info.dtype not in DTYPE_NAMES), None):
        raise UserError(f"{where}: {odd} has the type {tensors[odd].dtype}, which cannot be exported.")
    if contents.adapter is None and is_adapted(tensors):
        adapter_choice(None, where)
    if contents.adapter is not None:
        small[ADAPTER_CONFIG] = as_json(contents.adapter)
        return PlannedFolder(HfPlan.of_adapter(in_dtype(_table(tensors), options.dtype), small), source)
    config = parse_model_config(small, contents.model_files)
    changes: dict[str, Any] = {}
    tied: list[str] = []
    if options.need_architecture(config) or may_rename(config):
        # These two modules import transformers, which takes seconds.
        from rlhf.models.hf.architecture import architecture_of, check_fit
        from rlhf.models.hf.regrouped import as_in_files

        found = architecture_of(contents.model_files, value_model=options.value_model, tied=options.tied)
        if found is not None:
            tied = _tied_copies(source, where, found)
            source = as_in_files(source, found.parts, without=tied)
            tensors = source.contents.tensors
            if options.need_architecture(config):
                # A checkpoint's own configuration is in a scratch folder, which the user does not know.
                named = contents.model_files if options.compared else where
                check_fit(where, tensors, found, named, options.value_model)
                changes["architectures"] = [found.kind.__name__]
    if options.value_model:
        changes |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        changes["classifier_dropout"] = config.get("classifier_dropout", 0.0)
        config.pop("num_labels", None)
    plan = make_plan(in_dtype(_table(tensors), options.dtype), small, config, changes, options)
    return PlannedFolder(plan, source, tied)


def _tied_copies(source: TensorSource, where: Path, architecture: "Architecture") -> list[str]:
    """Return the tensors that the configuration ties to others; raise UserError if two tied tensors differ."""
    copies = list(architecture.copies_in(source.contents.tensors))
    for name, origin in copies:
        if not same_tensor(source, name, origin):
            raise UserError(
                f"{where}: {name} and {origin} differ, but the configuration ties the two. Name the "
                "model's own folder with --hf_model_path, or keep both: use merge with --no-tie-word-embedding."
            )
    return [name for name, _ in copies]


def ranges_of(tensors: Mapping[str, TensorInfo]) -> Iterator[tuple[str, int, int]]:
    """Yield ranges of RANGE_BYTES that cover every tensor: name, first element, end."""
    for name, info in tensors.items():
        step = max(1, RANGE_BYTES // info.dtype.itemsize)
        for start in range(0, info.numel, step):
            yield name, start, min(start + step, info.numel)


def same_tensor(source: TensorSource, name: str, other: str) -> bool:
    tensors = source.contents.tensors
    return tensors[name] == tensors[other] and all(
        torch.equal(source.read(name, start, stop), source.read(other, start, stop))
        for _, start, stop in ranges_of({name: tensors[name]})
    )


def converted(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight `name` converted to `dtype`; raise UserError as `check_range` does."""
    result = tensor.to(dtype)
    check_range(name, tensor, result)
    return result


def check_range(name: str, tensor: Tensor, result: Tensor) -> None:
    """Raise UserError if values of the weight `name` became infinite in the converted tensor `result`."""
    if result.dtype != torch.float16 or tensor.dtype == torch.float16:
        return
    if bool((result.isinf() & tensor.isfinite().to(result.device)).any()):
        raise UserError(
            f"float16: {name} has values beyond 65504, the largest float16. Set --dtype bfloat16, or for a "
            "run set checkpoint.hf_dtype=bfloat16."
        )


def prefetch_next(items: Iterator[T]) -> Iterator[T]:
    """Yield the elements of `items`, and produce the next one in another thread while the caller uses this one."""
    end: Any = object()
    with ThreadPoolExecutor(1) as beside:
        following = beside.submit(next, items, end)
        while (item := following.result()) is not end:
            following = beside.submit(next, items, end)
            yield item


def _table(tensors: Mapping[str, TensorInfo]) -> Tensors:
    return {name: (DTYPE_NAMES[info.dtype], info.shape) for name, info in tensors.items()}
