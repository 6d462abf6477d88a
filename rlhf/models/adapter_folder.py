"""Checks the peft folder in `model.lora.path` against the settings and the base model. Imports no torch."""

from pathlib import Path
from typing import Any

from rlhf.config.schema.lora import LoraConfig
from rlhf.errors import UserError, nearby
from rlhf.models.adapter_config import unsupported_settings
from rlhf.models.config_check import read_object
from rlhf.models.fingerprint import fingerprint
from rlhf.models.folder_check import safetensors_problem

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PLAIN = {"peft_type": "LORA", "bias": "none"}
"""Values that adapter_config.json has for plain LoRA on linear layers."""
EMPTY = (
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "layers_to_transform",
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
)
"""Settings that plain LoRA leaves out or empty."""


def check_adapter_folder(lora: LoraConfig, model_path: str, *, needed: bool = True) -> None:
    """Check the peft folder `model.lora.path`, unless the run resumes from a checkpoint with adapters (not `needed`).

    Raises:
        UserError: the folder is missing, is not an intact plain LoRA adapter, differs from `model.lora`, or belongs to
            another base model.
    """
    if not lora.enabled or lora.path is None or not needed:
        return
    folder, prefix = Path(lora.path).expanduser(), f"model.lora.path={lora.path}"
    if not folder.is_dir():
        raise UserError(f"{prefix}: there is no such folder.{nearby(folder, Path.is_dir)}")
    config = read_object(folder / CONFIG)
    if config is None or not (folder / WEIGHTS).is_file():
        missing = CONFIG if config is None else WEIGHTS
        raise UserError(
            f"{prefix}: is not an adapter folder of peft: it has no {missing} that can be read. Correct the path."
        )
    if problem := safetensors_problem(folder / WEIGHTS):
        raise UserError(f"{prefix}: {WEIGHTS} {problem}")
    _check_kind(prefix, config)
    _check_settings(prefix, config, lora)
    _check_base(prefix, config, model_path)


def _check_kind(prefix: str, config: dict[str, Any]) -> None:
    unsupported = [name for name, plain in PLAIN.items() if config.get(name) and config[name] != plain]
    unsupported += [*unsupported_settings(config), *(name for name in EMPTY if config.get(name))]
    if unsupported:
        found = ", ".join(f"{name} {config[name]!r}" for name in unsupported)
        raise UserError(
            f"{prefix}: has {found}, but only plain LoRA of linear layers is supported. Merge the adapter into its "
            "base with peft, set model.path to the result and model.lora.path=null."
        )


def _check_settings(prefix: str, config: dict[str, Any], lora: LoraConfig) -> None:
    pairs = {
        "rank": (config.get("r"), lora.rank),
        "alpha": (config.get("lora_alpha"), lora.alpha),
        "use_rslora": (bool(config.get("use_rslora")), lora.use_rslora),
        "use_dora": (bool(config.get("use_dora")), lora.use_dora),
    }
    different = {name: stored for name, (stored, present) in pairs.items() if stored != present}
    if different:
        found = ", ".join(f"{name} {stored} (here {pairs[name][1]})" for name, stored in different.items())
        remedy = " ".join(f"model.lora.{name}={str(stored).lower()}" for name, stored in different.items())
        raise UserError(f"{prefix}: was trained with {found}. Set {remedy}.")


def _check_base(prefix: str, config: dict[str, Any], model_path: str) -> None:
    named = config.get("base_model_name_or_path")
    if not named or named == model_path:
        return
    try:
        base, model = Path(str(named)).expanduser(), Path(model_path).expanduser()
        # A folder and a Hub name cannot be compared here.
        if base.is_dir() and model.is_dir():
            other = fingerprint(base) != fingerprint(model)
        else:
            other = not (base.is_absolute() or base.is_dir() or model.is_dir())
    except (OSError, RuntimeError):  # not a valid path, or an unreadable folder
        other = False
    if other:
        raise UserError(
            f"{prefix}: is an adapter of {named}, but model.path={model_path} is another model. Set model.path={named}."
        )
