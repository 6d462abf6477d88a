"""Writes any open checkpoint as a folder of torch.distributed.checkpoint (DCP): weights, moments, small files."""

from pathlib import Path

from torch import Tensor

from rlhf.convert.dcp.dcp_writer import write_dcp
from rlhf.models.hf.hf_folder import converted
from rlhf.models.hf.hf_plan import Progress
from rlhf.models.hf.small_files import read_small_files
from rlhf.models.hf.source import Contents, TensorInfo, TensorSource
from rlhf.storage.files import WrittenFile, write_file
from rlhf.storage.hf_layout import FLOAT_TYPES
from rlhf.storage.shards import DTYPES


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

    Parameters are at the top under their names in transformers; the moments are `optimizer.state.NAME.exp_avg`,
    `.exp_avg_sq` and `.step`, as torch flattens them (`flatten_optimizer_state_dict`). `dtype` (float32, ...) converts
    the weights, not the moments; None keeps each dtype. Config and tokenizer are copied if they are known.
    """
    saved = ConvertedSource(source, dtype, moments)
    written = []
    if source.contents.model_files is not None:
        for name, content in read_small_files(source.contents.model_files).items():
            written.append(write_file(folder, name, [content]))
    return written + write_dcp(folder, saved, paths=saved.paths, progress=progress)


def nbytes_of_dcp(source: TensorSource, *, dtype: str | None = None, moments: bool = True) -> int:
    """Return the bytes of the tensors that `write_dcp_folder` writes."""
    return sum(info.nbytes for info in ConvertedSource(source, dtype, moments).contents.tensors.values())


class ConvertedSource:
    """A `TensorSource` with the names and dtypes of a DCP folder; `paths` maps each tensor to its keys in the nested
    state dict."""

    def __init__(self, source: TensorSource, dtype: str | None, moments: bool) -> None:
        self._source, self.layout, self._names = source, source.layout, dict[str, str]()
        self.paths: dict[str, tuple[str, ...]] = {}
        self.contents = Contents({})
        for name, info in source.contents.tensors.items():
            to = DTYPES[FLOAT_TYPES[dtype]] if dtype is not None and info.dtype.is_floating_point else info.dtype
            self._add(name, (name,), TensorInfo(info.shape, to))
        for name, info in source.contents.moments.items() if moments else ():
            self._add(name, ("optimizer", f"state.{name}"), info)

    def _add(self, name: str, path: tuple[str, ...], info: TensorInfo) -> None:
        key = ".".join(path)
        self._names[key], self.paths[key], self.contents.tensors[key] = name, path, info

    def read(self, name: str, start: int, stop: int) -> Tensor:
        return converted(name, self._source.read(self._names[name], start, stop), self.contents.tensors[name].dtype)

    def close(self) -> None:
        self._source.close()
