"""Content of adapter_config.json, which says to peft what the tensors of an adapter are. Imports no torch."""

from collections.abc import Iterable, Mapping
from typing import Any

PREFIX = "base_model.model."
"""What the names of tensors in peft's files begin with, before those of the checkpoint."""
FAN_IN_FAN_OUT = ("gpt2", "openai-gpt")
"""Kinds of models whose linear layers have their weights as [in, out]."""


def adapter_config(lora: Mapping[str, Any], names: Iterable[str], base: str, model_type: str) -> dict[str, Any]:
    """The settings of an adapter as peft reads them.

    Args:
        lora: the section `model.lora` of the run.
        names: of the adapter's tensors in a checkpoint: `X.lora_A.weight` for a layer X.
        base: `model.path` of the run.
        model_type: as config.json of the base says it.
    """
    alpha = lora["alpha"]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora["rank"],
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": lora["dropout"],
        "use_rslora": lora["use_rslora"],
        "use_dora": lora["use_dora"],
        "target_modules": sorted({name.rpartition(".lora_")[0] for name in names}),
        "fan_in_fan_out": model_type in FAN_IN_FAN_OUT,
        "bias": "none",
        "inference_mode": True,
    }
