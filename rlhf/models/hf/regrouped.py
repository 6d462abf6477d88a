"""Shows an open checkpoint with the tensors of Hugging Face files, or with experts as the trainer stores them."""

from collections.abc import Collection
from dataclasses import replace

from transformers import AutoConfig, PretrainedConfig

from rlhf.models.fused_experts import fuse_experts
from rlhf.models.hf.named_tensors import JoinedTensor, NamedTensors
from rlhf.models.hf.source import ReadableTensor, SourceTensor, TensorInfo, TensorSource, tensors_of
from rlhf.models.skeleton import headers_of
from rlhf.storage.file_parts import FileParts, parts_of


def as_in_files(source: TensorSource, parts: FileParts, *, without: Collection[str] = ()) -> TensorSource:
    """Return `source` with the weights in `parts` replaced by their file tensors, and without the tensors `without`."""
    infos = {name: info for name, info in source.contents.tensors.items() if name not in without}
    here = {name: of_name for name, of_name in parts.items() if name in infos and of_name[-1].stop == infos[name].numel}
    if not here and not without:
        return source
    tensors = {
        part.name: JoinedTensor(TensorInfo(part.shape, tensor.info.dtype), [(tensor, part.start, part.stop)])
        for name, tensor in tensors_of(source).items()
        if name not in without
        for part in parts_of(here, name, tensor.info.shape)
    }
    return NamedTensors(source.layout, tensors, {}, replace(source.contents))


def as_trained(source: TensorSource) -> TensorSource:
    """Return `source` with the experts and their moments fused as in the model; unchanged without a configuration."""
    infos, moments, hf_config = source.contents.tensors, source.contents.moments, _config_of(source)
    if hf_config is None:
        return source
    kept, parts = fuse_experts(headers_of(infos), hf_config)
    if not parts:
        return source

    def joined(names: list[str], shape: tuple[int, ...]) -> JoinedTensor:
        tensors = [SourceTensor(source, name) for name in names]
        return JoinedTensor(TensorInfo(shape, tensors[0].info.dtype), [(t, 0, t.info.numel) for t in tensors])

    fused = {part.name for of_name in parts.values() for part in of_name}
    trained: dict[str, ReadableTensor] = {name: t for name, t in tensors_of(source).items() if name not in fused}
    state: dict[str, ReadableTensor] = {
        name: SourceTensor(source, name) for name in moments if name.rpartition(".")[0] not in fused
    }
    for name, of_name in parts.items():
        trained[name] = joined([part.name for part in of_name], kept[name].shape)
        for moment in ("exp_avg", "exp_avg_sq"):
            if all(f"{part.name}.{moment}" in moments for part in of_name):
                state[f"{name}.{moment}"] = joined([f"{part.name}.{moment}" for part in of_name], kept[name].shape)
        if (step := f"{of_name[0].name}.step") in moments:
            state[f"{name}.step"] = SourceTensor(source, step)
    return NamedTensors(source.layout, trained, state, replace(source.contents))


def _config_of(source: TensorSource) -> PretrainedConfig | None:
    folder = source.contents.model_files
    try:
        return None if folder is None else AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError):
        return None  # code that needs the configuration reports the error
