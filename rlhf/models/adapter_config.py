"""Content of adapter_config.json, which says to peft what the tensors of an adapter are. Imports no torch."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

PREFIX = "base_model.model."
"""What the names of tensors in peft's files begin with, before those of the checkpoint."""
FAN_IN_FAN_OUT = ("gpt2", "openai-gpt")
"""Kinds of models whose linear layers have their weights as [in, out]."""
KEEPS_BASE = (True, "gaussian", "orthogonal", "eva")
"""Beginnings of adapters (`init_lora_weights`) that leave the base as it is. The others change it, and their adapters
belong to a base that is in no file."""
VARIANTS = (
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "lora_bias",
    "monteclora_config",
    "use_bdlora",
    "use_qalora",
)
"""Settings, empty in plain LoRA, with which tensors of the same names and shapes mean something else than scale * B A
on every token."""


def not_plain(config: Mapping[str, Any]) -> Iterator[str]:
    """The settings in an adapter_config.json with which the adapter is no scale * B A beside the base as it is in its
    files."""
    if (begun := config.get("init_lora_weights")) and begun not in KEEPS_BASE:
        yield "init_lora_weights"
    yield from (name for name in VARIANTS if config.get(name))


def peft_settings(lora: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of peft's own LoraConfig from the section `model.lora`, but for the layers."""
    alpha = lora["alpha"]
    return {
        "task_type": "CAUSAL_LM",
        "r": lora["rank"],
        # peft writes it into its files as it is, and other tools read whole numbers.
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": lora["dropout"],
        "use_rslora": lora["use_rslora"],
        "use_dora": lora["use_dora"],
    }


def adapter_config(lora: Mapping[str, Any], names: Iterable[str], base: str, model_type: str) -> dict[str, Any]:
    """The settings of an adapter as peft reads them.

    Args:
        lora: the section `model.lora` of the run.
        names: of the adapter's tensors in a checkpoint: `X.lora_A.weight` for a layer X.
        base: `model.path` of the run.
        model_type: as config.json of the base says it.
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
