"""Loads adapters into vLLM's adapter manager and computes their digests, in the ranks and in servers."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from rlhf.config import LoraConfig, RolloutConfig
from rlhf.errors import UserError
from rlhf.models.adapter_config import PREFIX
from rlhf.rollout.weight_digest import digest

FACTORS = {"lora_A": "lora_a", "lora_B": "lora_b"}
"""peft's names of adapter factors -> names in `model_digests`, after the layer's name."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values of vLLM's `max_lora_rank`


def vllm_arguments(lora: LoraConfig, config: RolloutConfig) -> dict[str, Any]:
    """Return `rollout.engine_kwargs.vllm`, with the arguments that make vLLM serve one adapter of this rank."""
    ours = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": vllm_rank(lora)}
    return ours | config.engine_kwargs.vllm


def vllm_rank(lora: LoraConfig) -> int:
    """Return the smallest `max_lora_rank` of vLLM that is at least `lora.rank`."""
    return next(allowed for allowed in RANKS if lora.rank <= allowed)


def adapter_settings(lora: LoraConfig) -> dict[str, Any]:
    """Return settings as in adapter_config.json, but without layers: vLLM finds the layers by the tensors' names."""
    return {"r": lora.rank, "lora_alpha": lora.alpha, "use_rslora": lora.use_rslora, "target_modules": []}


def adapter_digests(adapters: Mapping[str, Tensor], lora: LoraConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the digests that `model_digests` computes in `dtype` after vLLM has loaded `adapters`.

    `adapters` have their names in checkpoints. vLLM multiplies lora_B by the scale.
    """
    scaling = lora.alpha / (math.sqrt(lora.rank) if lora.use_rslora else lora.rank)

    def of(name: str, tensor: Tensor) -> Tensor:
        return digest(tensor if "lora_A" in name or scaling == 1 else tensor * scaling, dtype)

    return {_digest_name(name): of(name, tensor) for name, tensor in adapters.items()}


def _digest_name(name: str) -> str:
    for end, factor in FACTORS.items():
        name = name.replace(f".{end}.weight", f".{factor}")
    return name


def is_factor(name: str) -> bool:
    """Return whether a name in `model_digests` is an adapter's factor."""
    return name.endswith(tuple(f".{factor}" for factor in FACTORS.values()))


def replace_adapters(
    manager: Any, number: int, settings: Mapping[str, Any], adapters: Mapping[str, Tensor], dtype: torch.dtype
) -> None:
    """Replace all adapters of vLLM's adapter manager by `adapters`, and activate them.

    Args:
        manager: a `vllm.lora.model_manager.LoRAModelManager`.
        number: vLLM's number of the adapter, with which requests name the adapter.
        settings: `adapter_settings`.
        adapters: `X.lora_A.weight` and `X.lora_B.weight` for each adapted weight `X.weight`, on the CPU. vLLM
            multiplies lora_B by the scale in place.

    Raises:
        UserError: vLLM serves no adapters for one of these weights.
    """
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    helper = PEFTHelper.from_dict(dict(settings))
    helper.validate_legal(manager.lora_config)
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    adapter = LoRAModel.from_lora_tensors(
        number,
        {PREFIX + name: tensor for name, tensor in adapters.items()},
        helper,
        device="cpu",
        dtype=dtype,
        weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
    )
    manager.remove_all_adapters()
    manager.add_adapter(adapter)
    # vLLM silently ignores adapters of unknown layers.
    if unserved := sorted(adapter.loras.keys() - manager.modules.keys()):
        raise UserError(
            f"rollout.lora=native: vLLM serves no adapters for {', '.join(unserved[:3])} of this model "
            f"({len(unserved)} in all). Set rollout.lora=merged."
        )
    manager.activate_adapter(number)


def copies(adapters: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return copies of `adapters` in `dtype` on the CPU. vLLM may change the copies."""
    return {name: tensor.detach().to("cpu", dtype, copy=True).contiguous() for name, tensor in adapters}
