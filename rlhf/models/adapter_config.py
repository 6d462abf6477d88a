"""Writes and checks peft's adapter_config.json, which describes the tensors of an adapter. Imports no torch."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

PREFIX = "base_model.model."  # peft's files put this prefix before our checkpoints' names
FAN_IN_FAN_OUT = ("gpt2", "openai-gpt")  # values of `model_type` whose linear layers store their weights as [in, out]
KEEPS_BASE = (True, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that leave the base unchanged. With any other value, peft changes the base before
training, and does not save the changed base."""
VARIANTS = (
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "lora_bias",
    "monteclora_config",
    "use_bdlora",
    "use_qalora",
)
"""Settings that are empty in plain LoRA. With any of them, an adapter does not add scale * B A for every token."""


def unsupported_settings(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the settings with which an adapter is not plain LoRA: scale * B A, added to the stored base."""
    if (initial := config.get("init_lora_weights")) and initial not in KEEPS_BASE:
        yield "init_lora_weights"
    yield from (name for name in VARIANTS if config.get(name))


def peft_settings(lora: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of peft's LoraConfig from the section `model.lora`, except the target modules."""
    alpha = lora["alpha"]
    return {
        "task_type": "CAUSAL_LM",
        "r": lora["rank"],
        # peft writes the value into its files unchanged, and other tools expect a whole number.
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": lora["dropout"],
        "use_rslora": lora["use_rslora"],
        "use_dora": lora["use_dora"],
    }


def adapter_config(lora: Mapping[str, Any], names: Iterable[str], base: str, model_type: str) -> dict[str, Any]:
    """Return the settings of an adapter as peft reads them.

    Args:
        lora: the section `model.lora` of the run.
        names: adapter tensors in a checkpoint: `X.lora_A.weight` for a layer X.
        base: `model.path` of the run.
        model_type: from config.json of the base.
    """
    return {
        **peft_settings(lora),
        "peft_type": "LORA",
        "base_model_name_or_path": base,
        "target_modules": sorted({name.rpartition(".lora_")[0] for name in names}),
        "fan_in_fan_out": model_type in FAN_IN_FAN_OUT,
        "bias": "none",
        "inference_mode": True,
    }
