"""Computes digests of a vLLM model's weights on this device, by vLLM's names."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rlhf.rollout.vllm.adapter_tensors import FACTORS
from rlhf.rollout.weight_digest import Digest, WeightCheck, WeightsMismatch, digest, in_any_order, read_digests

_PACKED = "_rlhf_packed_digest"


def weight_check(model: nn.Module, *, exact: bool) -> WeightCheck:
    """Return the check of `model` against Hugging Face weights; `exact`: the model is not quantized."""
    mapper: Any = getattr(model, "hf_to_vllm_mapper", None)

    def renamed(name: str) -> str:
        return (mapper.map_name(name) if mapper is not None else None) or name

    return WeightCheck(getattr(model, "packed_modules_mapping", None), renamed, exact=exact)


def record_packing(model: nn.Module, dtype: torch.dtype) -> None:
    """Let linear layers and heads on a CPU record the digest, in `dtype`, of each weight that they pack.

    On a CPU, vLLM computes with a packed copy that cannot be read, and drops the weight of a linear layer.
    """
    for module in model.modules():
        method, weight = getattr(module, "quant_method", None), getattr(module, "weight", None)
        if method is None or not isinstance(weight, Tensor) or weight.device.type != "cpu" or hasattr(module, _PACKED):
            continue
        setattr(module, _PACKED, None)
        method.process_weights_after_loading = _recording(method.process_weights_after_loading, dtype)


def _recording(process: Any, dtype: torch.dtype) -> Any:
    def record(layer: Any) -> None:
        setattr(layer, _PACKED, digest(_without_replicas(layer, layer.weight), dtype))
        process(layer)

    return record


def model_digests(model: nn.Module, dtype: torch.dtype, buffers: Collection[str] = ()) -> dict[str, Digest]:
    """Return digests in `dtype` of this device's weights: parameters or slices of them, adapter factors, and `buffers`.

    `buffers` are names of buffers; `FACTORS` are the adapter factors.

    If several devices have the same key and value heads, only the first includes these heads in its digests.
    """
    found: dict[str, Tensor] = {name: digest(b, dtype) for name, b in model.named_buffers() if name in buffers}
    names: dict[int, str] = {}
    factors: set[str] = set()
    for path, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            # A tied weight gets one of its names.
            name = names.setdefault(id(parameter), plain_name(f"{path}.{own}" if path else own))
            packed = getattr(module, _PACKED, None) if own == "weight" else None
            if parameter.numel() and name not in found:
                found[name] = digest(_without_replicas(module, parameter), dtype)
            if packed is not None and not (name in found and torch.equal(found[name], packed)):
                found[name] = packed  # the layer computes with the packed copy
        for factor in FACTORS.values():
            # vLLM serves one adapter at a time, in slot 0. A fused layer has one tensor per part (q, k, v).
            slices = [stacked[0] for stacked in getattr(module, f"{factor}_stacked", ())]
            if slices:
                found[f"{path}.{factor}"] = torch.stack([digest(part, dtype) for part in slices]).sum(0)
                factors.add(f"{path}.{factor}")
    # vLLM pads factors to its largest rank, which moves their elements.
    return {name: in_any_order(read) if name in factors else read for name, read in read_digests(found).items()}


def unsent_digests(model: nn.Module) -> dict[str, Tensor]:
    """Return the digests of all buffers, as tensors on the device. A sleep must not change any of the buffers."""
    return {name: digest(buffer, buffer.dtype) for name, buffer in model.named_buffers() if buffer.numel()}


def check_unsent(before: Mapping[str, Tensor], after: Mapping[str, Tensor], version: str) -> None:
    """Compare results of `unsent_digests`. Raises WeightsMismatch with the buffers that changed."""
    old, new = read_digests(before), read_digests(after)
    if changed := [name for name in old if new.get(name) != old[name]]:
        raise WeightsMismatch(
            f"vLLM changed {len(changed)} buffers of the model in a sleep ({version}): {', '.join(changed[:8])}. "
            "Set rollout.sleep_level=1, or 0."
        )


def plain_name(name: str) -> str:
    """Return a weight's name without the wrapper layer that vLLM adds for adapters."""
    return name.replace(".base_layer.", ".")


def _without_replicas(module: Any, parameter: Tensor) -> Tensor:
    replicas = getattr(module, "num_kv_head_replicas", 1)
    if replicas == 1 or module.tp_rank % replicas == 0:
        return parameter
    return parameter[: module.num_heads * module.head_size]
