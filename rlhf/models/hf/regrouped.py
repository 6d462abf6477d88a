"""Shows an open checkpoint with experts as Hugging Face files store them, or as the trainer stores them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from rlhf.models.fused_experts import fuse_experts, parts_in_files
from rlhf.models.hf.source import TensorInfo, TensorSource, cut
from rlhf.models.model_files import FileTensor
from rlhf.storage.file_parts import parts_of
from rlhf.storage.shards import DTYPE_NAMES

Piece = tuple[str, int, int]  # tensor name and elements [start, stop) in the checkpoint


def as_in_files(source: TensorSource, hf_config: PretrainedConfig | None = None) -> TensorSource:
    """Return `source` with the names and tensors that transformers writes for `hf_config` (default: the source's own).

    Return `source` unchanged if the configuration is unknown.
    """
    infos, hf_config = source.contents.tensors, hf_config or _config_of(source)
    if hf_config is None:
        return source
    parts = parts_in_files({name: info.shape for name, info in infos.items()}, hf_config)
    if not parts:
        return source
    tensors: dict[str, TensorInfo] = {}
    pieces: dict[str, list[Piece]] = {}
    for name, info in infos.items():
        for part in parts_of(parts, name, info.shape):
            tensors[part.name] = TensorInfo(part.shape, info.dtype)
            pieces[part.name] = [(name, part.start, part.stop)]
    return Regrouped(source, tensors, {}, pieces)


def as_trained(source: TensorSource) -> TensorSource:
    """Return `source` with the experts and their moments fused as in the model; unchanged without a configuration."""
    infos, moments, hf_config = source.contents.tensors, source.contents.moments, _config_of(source)
    if hf_config is None:
        return source
    kept, parts = fuse_experts(file_tensors(infos), hf_config)
    if not parts:
        return source
    tensors = {name: infos[name] for name in kept if name not in parts}
    gone = {part.name for of_name in parts.values() for part in of_name}
    kept_moments = {name: info for name, info in moments.items() if name.rpartition(".")[0] not in gone}
    pieces: dict[str, list[Piece]] = {}
    for name, of_name in parts.items():
        shape = kept[name].shape
        tensors[name] = TensorInfo(shape, infos[of_name[0].name].dtype)
        pieces[name] = [(part.name, 0, part.stop - part.start) for part in of_name]
        for moment in ("exp_avg", "exp_avg_sq"):
            if all(f"{part.name}.{moment}" in moments for part in of_name):
                kept_moments[f"{name}.{moment}"] = TensorInfo(shape, moments[f"{of_name[0].name}.{moment}"].dtype)
                pieces[f"{name}.{moment}"] = [(f"{own}.{moment}", start, stop) for own, start, stop in pieces[name]]
        if (step := f"{of_name[0].name}.step") in moments:
            kept_moments[f"{name}.step"], pieces[f"{name}.step"] = moments[step], [(step, 0, 1)]
    return Regrouped(source, tensors, kept_moments, pieces)


def _config_of(source: TensorSource) -> PretrainedConfig | None:
    folder = source.contents.model_files
    try:
        return None if folder is None else AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError):
        return None  # code that needs the configuration reports the error


def file_tensors(infos: Mapping[str, TensorInfo]) -> dict[str, FileTensor]:
    return {name: FileTensor("", DTYPE_NAMES[info.dtype], info.shape) for name, info in infos.items()}


class Regrouped:
    """A source with some tensors built from consecutive `pieces` of the tensors of `source`."""

    def __init__(
        self,
        source: TensorSource,
        tensors: dict[str, TensorInfo],
        moments: dict[str, TensorInfo],
        pieces: Mapping[str, Sequence[Piece]],
    ) -> None:
        self._source, self._pieces, self.layout = source, pieces, source.layout
        self.contents = replace(source.contents, tensors=tensors, moments=moments)

    def read(self, name: str, start: int, stop: int) -> Tensor:
        pieces = self._pieces.get(name)
        if pieces is None:
            return self._source.read(name, start, stop)
        found = [self._source.read(*piece) for piece in cut(pieces, start, stop)]
        return found[0] if len(found) == 1 else torch.cat(found)

    def close(self) -> None:
        self._source.close()
