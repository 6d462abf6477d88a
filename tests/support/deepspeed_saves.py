"""Saves checkpoints with DeepSpeed's engine on real ranks: all stages and precisions, tied embeddings, frozen parts."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from rlhf.backends.deepspeed import import_deepspeed
from tests.support.tiny_models import tiny_config

STEPS = 2
NO_CLIPPING = 1e9
FROZEN = ("model.layers.0.mlp.up_proj.weight", "model.norm.weight")
# A Llama with odd parameter sizes, which no number of ranks divides.
SETTINGS: dict[str, dict[str, int]] = {
    "llama": {"hidden_size": 15, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 4},
    "qwen2": {},
}
GROUPED = {"round_robin_gradients": True, "contiguous_gradients": True, "sub_group_size": 1500}


@dataclass(frozen=True)
class Saved:
    """Settings of a saved folder."""

    stage: int
    architecture: str = "llama"
    bfloat16: bool = False
    frozen: bool = False
    grouped: bool = False
    """Whether there are two parameter groups with several partitions each."""
    named: bool = False
    """Whether the optimizer has the names of its parameters, in another order than the model's."""


SAVES = {
    "zero0": Saved(0, named=True),
    "zero0-bfloat16": Saved(0, "qwen2", bfloat16=True),
    "zero1-bfloat16": Saved(1, bfloat16=True),
    "zero1-frozen": Saved(1, frozen=True),
    "zero2-grouped": Saved(2, "qwen2", grouped=True),
    "zero2-bfloat16-frozen": Saved(2, bfloat16=True, frozen=True),
    "zero3-bfloat16-frozen": Saved(3, bfloat16=True, frozen=True),
    "zero3-grouped": Saved(3, "qwen2", grouped=True),
}


def save_all(rank: int, folder: str, kinds: list[str]) -> None:
    """Train each of `kinds` for two steps and save it in `folder/KIND`."""
    for kind in kinds:
        save(Path(folder, kind), SAVES[kind])


def save(folder: Path, saved: Saved) -> None:
    engine = start_engine(saved)
    for step in range(STEPS):
        engine.backward(engine(input_ids=batch(step), labels=batch(step), use_cache=False).loss)
        engine.step()
    engine.save_checkpoint(str(folder), client_state={"training_step": STEPS, "rng": np.random.get_state()})


def batch(step: int) -> Tensor:
    """Return a step's tokens, [2, 7], the same on every rank."""
    return torch.randint(0, 512, (2, 7), generator=torch.Generator().manual_seed(step))


def train_plainly(saved: Saved) -> dict[str, Tensor]:
    """Train with torch on one rank; return float32 weights and moments, which equal a save's up to rounding."""
    model, optimizer = model_and_optimizer(saved)
    for step in range(STEPS):
        model(input_ids=batch(step), labels=batch(step), use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    found = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        found |= {f"{name}.{key}": value for key, value in optimizer.state.get(parameter, {}).items()}
    return found


def start_engine(saved: Saved) -> Any:
    """Start DeepSpeed's engine with the model of `saved`."""
    deepspeed = import_deepspeed(torch.device("cpu"))
    model, optimizer = model_and_optimizer(saved)
    zero = {"stage": saved.stage, "stage3_param_persistence_threshold": 10} | (GROUPED if saved.grouped else {})
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "communication_data_type": "fp32",
        "gradient_clipping": NO_CLIPPING,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
    }
    if saved.bfloat16:
        settings["bf16"] = {"enabled": True}
        if saved.stage:
            settings["data_types"] = {"grad_accum_dtype": "fp32"}
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, lr_scheduler=schedule)
    return engine


def model_and_optimizer(saved: Saved) -> tuple[PreTrainedModel, torch.optim.Optimizer]:
    """Return the float32 model of `saved` before its first step, and its optimizer."""
    torch.manual_seed(3)
    model = (
        AutoModelForCausalLM.from_config(tiny_config(saved.architecture, **SETTINGS[saved.architecture]))
        .float()
        .train()
    )
    if saved.frozen:
        for name in FROZEN:
            model.get_parameter(name).requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [{"params": trained}]
    if saved.named:
        groups = [{"params": sorted(model.named_parameters())}]
    if saved.grouped:
        matrices, vectors = [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim < 2]
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=0.01, eps=1e-3)
