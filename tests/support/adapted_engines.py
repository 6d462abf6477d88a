"""Builds training backends of a tiny model with adapters, and the same model with plain peft."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf.assemble.learners import adapter_files
from rlhf.backends import build_backend
from rlhf.backends.base import TrainingBackend
from rlhf.backends.training import Training
from rlhf.config import LoraConfig, ModelConfig
from rlhf.models.adapter_config import PREFIX, peft_settings
from rlhf.models.adapter_layers import Adapters, add_adapters, target_names
from rlhf.models.adapter_start import copy_slice, fill_from_seed
from tests.support.engines import CPU, ENGINES, OPTIM, make_engine
from tests.support.tiny_updates import tiny_qwen2

LORA = LoraConfig(enabled=True, rank=4, alpha=8.0)
ADAPTED = "-lora"
"""Suffix of an engine's kind that trains adapters."""
DORA = LoraConfig(enabled=True, rank=4, alpha=8.0, use_dora=True, use_rslora=True)


def adapted_engine(
    kind: str, seed: int = 0, lora: LoraConfig = LORA, *, recompute: bool = False, base: Path | None = None
) -> TrainingBackend:
    """Return `tiny_qwen2(0)` with adapters from `seed` in the engine `kind` of `ENGINES`; `base` is its folder."""
    model, config = tiny_qwen2(0), ENGINES[kind]
    add_adapters(model, lora, torch.bfloat16 if config.autocast == "bfloat16" else torch.float32)
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    files = {"config.json": b"{}"}
    if base is not None:
        own = {"config.json": (base / "config.json").read_bytes()}
        files = own | adapter_files(ModelConfig(path=str(base), lora=lora), model)
    backend = build_backend(
        model, config, CPU, Training(OPTIM, grad_clip=0.5, total_optimizer_steps=20, hf_files=files)
    )
    shards, adapters = backend.model_shards(), Adapters.of(backend.module)
    assert adapters is not None
    fill_from_seed(shards, seed)
    for name, norms in adapters.norms(backend.base_tensors()) if lora.use_dora else ():
        copy_slice(shards[name], norms)
    backend.after_load()
    return backend


def engine_with_or_without_adapters(kind: str, seed: int) -> TrainingBackend:
    """Return a new engine with a model from `seed`, or with adapters from `seed` if `kind` ends with `ADAPTED`."""
    plain = kind.removesuffix(ADAPTED)
    return make_engine(kind, seed) if plain == kind else adapted_engine(plain, seed)


def with_plain_peft(state: dict[str, Tensor], lora: LoraConfig = LORA) -> Any:
    """Return peft's model around `tiny_qwen2(0)`, with the adapters `state`, by their names in checkpoints."""
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model, set_peft_model_state_dict

    model: PreTrainedModel = tiny_qwen2(0)
    adapted = get_peft_model(model, PeftConfig(**peft_settings(asdict(lora)), target_modules=target_names(model, lora)))
    set_peft_model_state_dict(adapted, {PREFIX + name: tensor for name, tensor in state.items()})
    return adapted
