"""Builds models on the meta device, and finds the file tensor of each weight."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf.models.hf.source import TensorInfo
from rlhf.models.model_files import FileTensor
from rlhf.models.token_values import HEADS
from rlhf.storage.shards import DTYPE_NAMES, DTYPES


def skeleton(
    load_from: Callable[[Mapping[str, Tensor]], PreTrainedModel], headers: Mapping[str, FileTensor]
) -> tuple[PreTrainedModel, dict[str, str]] | None:
    """Build a model with parameters on the meta device; return it with each weight's name in the files.

    Return None if some weight is not exactly one tensor of the files: it is fused, or the configuration ties it to
    another weight although the files have both. A head may be missing in the files.

    `load_from` lets transformers map names, find missing weights and create buffers. The loaded tensors are stand-ins,
    views of one small tensor. If a weight of the loaded model is still a stand-in, transformers uses the file's tensor
    unchanged. Strides differ in every dimension, so that a transposed view is recognised.
    """
    tensors = stand_ins(headers)
    origins = {_identity(tensor): name for name, tensor in tensors.items()}
    model = load_from(tensors)
    named = dict(model.named_parameters())
    buffers = dict(persistent_buffers(model))
    names = {}
    for name, tensor in (named | buffers).items():
        origin = origins.get(_identity(tensor))
        if origin is not None and tensor.shape == headers[origin].shape:
            names[name] = origin
        elif name.split(".")[0] not in HEADS:
            return None
    if _has_untied_copies(model):
        return None

    def on_meta(name: str, parameter: nn.Parameter) -> nn.Parameter:
        if name not in names:
            return parameter
        return nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"), parameter.requires_grad)

    replace_parameters(model, on_meta)
    for name in buffers.keys() & names.keys():
        module, _, own = name.rpartition(".")
        setattr(model.get_submodule(module), own, torch.empty(buffers[name].shape, dtype=buffers[name].dtype))
    return model, names


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that a module's state dict has, by name."""
    persistent = module.state_dict().keys()
    return ((name, buffer) for name, buffer in module.named_buffers() if name in persistent)


def cast_parameters(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast the floating-point parameters of `model`, on any device, to `dtype`.

    Buffers, and weights that the architecture needs in float32, stay unchanged.
    """
    kept = set(float32_parameters(model, dtype))

    def cast(name: str, p: nn.Parameter) -> nn.Parameter:
        if not p.is_floating_point() or name in kept:
            return p
        return nn.Parameter(p.detach().to(dtype), p.requires_grad)

    replace_parameters(model, cast)


def float32_parameters(model: PreTrainedModel, dtype: torch.dtype) -> list[str]:
    """Return the names of parameters that the architecture needs in float32 while the others are in `dtype`."""
    kept = model._get_dtype_plan(dtype)
    return [name for name, _ in model.named_parameters() if any(part in name for part in kept)]


def materialise(model: PreTrainedModel, device: torch.device) -> None:
    """Allocate uninitialised memory on `device` for parameters on the meta device. Tied parameters stay tied."""

    def filled(_: str, p: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(torch.empty_like(p, device=device), p.requires_grad) if p.is_meta else p

    replace_parameters(model, filled)


def headers_of(tensors: Mapping[str, TensorInfo]) -> dict[str, FileTensor]:
    return {name: FileTensor("", DTYPE_NAMES[info.dtype], info.shape) for name, info in tensors.items()}


def stand_ins(headers: Mapping[str, FileTensor]) -> dict[str, Tensor]:
    """Return tensors of the headers' shapes in almost no memory: views at distinct offsets of one tensor per type."""
    shapes = [tensor.shape for tensor in headers.values() if all(tensor.shape)]
    extent = len(headers) + max((sum((i + 1) * size for i, size in enumerate(shape)) for shape in shapes), default=0)
    shared: dict[torch.dtype, Tensor] = {}
    result = {}
    for offset, (name, tensor) in enumerate(headers.items()):
        dtype = DTYPES[tensor.dtype]
        dtype = torch.float32 if dtype.is_floating_point else dtype
        if dtype not in shared:
            # All floats of the shared tensor must differ, because transformers treats equal tensors as one.
            shared[dtype] = torch.arange(extent, dtype=torch.float32).to(dtype)
        strides = range(1, len(tensor.shape) + 1)
        result[name] = shared[dtype].as_strided(tensor.shape, tuple(strides), offset)
    return result


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.stride()


def _has_untied_copies(model: PreTrainedModel) -> bool:
    """Return whether two weights that the configuration ties are separate in the model, because the files have both."""
    named = dict(model.named_parameters(remove_duplicate=False))
    pairs = model.get_expanded_tied_weights_keys(all_submodels=True).items()
    return any(named.get(a) is not named.get(b) for a, b in pairs)


def replace_parameters(model: PreTrainedModel, new: Callable[[str, nn.Parameter], nn.Parameter]) -> None:
    """Replace every parameter by `new(name, parameter)`; a shared parameter stays shared."""
    replaced = {id(p): (p, new(name, p)) for name, p in model.named_parameters()}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, replaced[id(parameter)][1])
