"""Writes any open checkpoint as a folder of torch.distributed.checkpoint (DCP): weights, moments, small files."""

from pathlib import Path

from rlhf.convert.dcp.dcp_writer import write_dcp
from rlhf.models.hf.hf_folder import converted
from rlhf.models.hf.hf_plan import Progress
from rlhf.models.hf.named_tensors import NamedTensors
from rlhf.models.hf.small_files import read_small_files
from rlhf.models.hf.source import FunctionTensor, ReadableTensor, SourceTensor, TensorInfo, TensorSource
from rlhf.storage.files import WrittenFile, write_file
from rlhf.storage.hf_layout import FLOAT_TYPES
from rlhf.storage.shards import DTYPES

STATE = "optimizer.state."
"""Prefix of the moments' names."""


def write_dcp_folder(
    source: TensorSource,
    folder: Path,
    *,
    dtype: str | None = None,
    moments: bool = True,
    progress: Progress = lambda count: None,
) -> list[WrittenFile]:
    """Write an open checkpoint into the empty `folder`, which `torch.distributed.checkpoint.load` opens under any
    parallel layout. Return the written files with hashes, computed in memory before the write.

    Parameters are top-level entries under their transformers names; the moments are `optimizer.state.NAME.exp_avg`,
    `.exp_avg_sq` and `.step`, as torch flattens them (`flatten_optimizer_state_dict`). `dtype` (float32, ...) converts
    the weights, not the moments; None keeps each dtype. Also copies config and tokenizer if `source` has them.
    """
    saved = as_dcp(source, dtype, moments)
    written = []
    if source.contents.model_files is not None:
        for name, content in read_small_files(source.contents.model_files).items():
            written.append(write_file(folder, name, [content]))
    # The keys of each tensor in the nested state dict.
    names = saved.contents.tensors
    paths = {name: tuple(name.split(".", 1)) if name.startswith(STATE) else (name,) for name in names}
    return written + write_dcp(folder, saved, paths=paths, progress=progress)


def as_dcp(source: TensorSource, dtype: str | None, moments: bool = True) -> NamedTensors:
    """Return `source` with the names and dtypes of a DCP folder."""
    tensors = {name: _in_dtype(SourceTensor(source, name), dtype) for name in source.contents.tensors}
    state = {STATE + name: SourceTensor(source, name) for name in source.contents.moments if moments}
    return NamedTensors(source.layout, {**tensors, **state})


def _in_dtype(tensor: SourceTensor, dtype: str | None) -> ReadableTensor:
    if dtype is None or not tensor.info.dtype.is_floating_point:
        return tensor
    info = TensorInfo(tensor.info.shape, DTYPES[FLOAT_TYPES[dtype]])
    return FunctionTensor(info, lambda start, stop: converted(tensor.name, tensor.read(start, stop), info.dtype))
