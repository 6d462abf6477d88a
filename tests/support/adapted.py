"""Makes adapters of a tiny model by hand, as peft's folder and in verl's file of one rank."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

PREFIX = "base_model.model."
Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}


def factors_for(base: Path) -> dict[str, Tensor]:
    """Return random factors of two weights, by their names in peft's files."""
    weights = load_file(base / "model.safetensors")
    torch.manual_seed(3)
    return {
        f"{PREFIX}{name}.lora_{kind}.weight": torch.randn(shape)
        for name in (Q, DOWN)
        for rows, columns in [weights[f"{name}.weight"].shape]
        for kind, shape in (("A", (4, columns)), ("B", (rows, 4)))
    }


def configure(folder: Path, **settings: Any) -> None:
    """Write adapter_config.json."""
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | settings))


def save_adapter(base: Path, folder: Path) -> Path:
    """Save an adapter in peft's format."""
    folder.mkdir(parents=True)
    save_file(factors_for(base), folder / "adapter_model.safetensors")
    configure(folder, base_model_name_or_path=str(base))
    return folder


def save_adapted_by_verl(base: Path, folder: Path) -> Path:
    """Save base and adapter in verl's file of a single rank."""
    folder.mkdir(parents=True)
    state = {}
    for name, tensor in load_file(base / "model.safetensors").items():
        module = name.removesuffix(".weight")
        state[f"{PREFIX}{module}.base_layer.weight" if module in (Q, DOWN) else f"{PREFIX}{name}"] = tensor
    for name, tensor in factors_for(base).items():
        state[name.replace(".weight", ".default.weight")] = tensor
    torch.save(state, folder / "model_world_size_1_rank_0.pt")
    (folder / "lora_train_meta.json").write_text(json.dumps({"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"}))
    return folder
