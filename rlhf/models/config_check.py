"""Checks a model's config.json against the model's role and the data's lengths, before the model loads.

The checks of `path` settings accept every Hub name and, with `trust_remote_code`, every architecture with its own code.
transformers' tables are parsed as text: importing them imports torch and takes seconds.
"""

import json
import re
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlhf.errors import UserError, did_you_mean, nearest

CAUSAL, CLASSIFIER = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES"
"""transformers' tables of architectures with a class for policies, and with a class for reward models."""
KNOWN = "CONFIG_MAPPING_NAMES"
WRITES_TEXT = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
"""Suffixes of the names of classes that generate text."""
SIZES = (
    "vocab_size",
    "hidden_size",
    "n_embd",
    "num_hidden_layers",
    "n_layer",
    "num_attention_heads",
    "n_head",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
)
"""Settings in config.json that are positive numbers. Some architectures have a list with a number per layer."""
LAYERS = ("num_hidden_layers", "n_layer")
MOST_LAYERS = 10_000
"""Limit of layers if the shapes of the weights are unknown. Building more layers would take minutes."""
FEW_LAYERS = 1_000
"""A model may have this many layers even if it has fewer tensors, because layers can share weights."""
_TASKS = {CAUSAL: "generates text from text (a causal LM)", CLASSIFIER: "gives a text a score (a sequence classifier)"}


def check_policy(name: str, trust_remote_code: bool, max_prompt: int, max_response: int) -> None:
    """Check the policy in the folder `name`; `max_prompt` and `max_response` are lengths in tokens.

    Raises:
        UserError: the policy's architecture has no causal LM in transformers, or the policy is quantized, has too few
            positions or an impossible end-of-sequence token.
    """
    _check_architecture("model.path", name, trust_remote_code, CAUSAL)
    folder = Path(name).expanduser()
    if (config := read_object(folder / "config.json")) is not None:
        check_not_quantized(name, config.get("quantization_config"))
        check_positions(_positions(config), max_prompt, max_response)
        # transformers reads the tokens in config.json only if there is no generation_config.json.
        generation = read_object(folder / "generation_config.json")
        file, tokens = ("config.json", config) if generation is None else ("generation_config.json", generation)
        check_eos(f"model.path={name}: {file}", tokens.get("eos_token_id"), text_part(config).get("vocab_size"))


def check_critic(name: str, trust_remote_code: bool) -> None:
    """Raise UserError if config.json in the folder `name` has no architecture that transformers supports."""
    _check_architecture("critic.path", name, trust_remote_code, None)


def check_reward_model(name: str, trust_remote_code: bool) -> None:
    """Raise UserError unless the folder `name` has a sequence classifier with one label."""
    _check_architecture("reward_model.path", name, trust_remote_code, CLASSIFIER)
    config = read_object(Path(name).expanduser() / "config.json")
    if config is not None and (labels := _labels(config)) is not None:
        named = config.get("architectures")
        if labels != 1 and isinstance(named, list) and any(str(each).endswith(WRITES_TEXT) for each in named):
            raise UserError(
                f"reward_model.path={name}: {' '.join(named)} in config.json writes text, and gives no score. Set a "
                "sequence-classification model with one label. To let a model that writes text judge, call it "
                "from a function of your own in reward.functions."
            )
        check_labels(f"reward_model.path={name}", labels)


def check_flash_attention(attention: str, cuda: bool, autocast: str | None) -> None:
    """Raise UserError if the run cannot use flash-attention.

    Args:
        attention: `model.attn_implementation`, which selects flash-attention.
        cuda: whether the run uses GPUs.
        autocast: `backend.autocast`.
    """
    shown, instead = f"model.attn_implementation={attention}", "set model.attn_implementation=sdpa"
    if not cuda:
        raise UserError(f"{shown}: needs a GPU, but this run is on the CPU; {instead}.")
    if autocast != "bfloat16":
        raise UserError(
            f"{shown}: cannot compute in float32; set backend.autocast=bfloat16 (it is {autocast}), or {instead}."
        )
    if not any(map(find_spec, ("flash_attn", "kernels"))):
        raise UserError(
            f"{shown}: the package flash-attn is not installed. Install it (pip install flash-attn "
            f"--no-build-isolation), or {instead}."
        )


def default_attention(model_type: str) -> str:
    """Return the attention that transformers chooses for the architecture: `sdpa`, or `eager` if it has no sdpa."""
    module = model_type.replace("-", "_")
    path = _transformers() / module / f"modeling_{module}.py"
    return "eager" if path.is_file() and "_supports_sdpa = True" not in path.read_text(encoding="utf-8") else "sdpa"


def check_labels(prefix: str, labels: int | None) -> None:
    if labels != 1:
        raise UserError(
            f"{prefix} has {labels} labels, but a reward model needs one (num_labels in config.json, where a missing "
            "value means 2). Set reward_model.path to a sequence-classification model with one label."
        )


def check_eos(where: str, tokens: Any, vocabulary: Any) -> None:
    """Check `eos_token_id`, the tokens that end a response: None, a token, or a list of tokens.

    Args:
        where: the file with `tokens`, for messages.
        vocabulary: number of tokens that the model can write; if not an int, the limit is not checked.

    Raises:
        UserError: an entry is not an int, or not in the vocabulary.
    """
    limit = vocabulary if isinstance(vocabulary, int) else None
    for token in tokens if isinstance(tokens, list) else [] if tokens is None else [tokens]:
        if type(token) is not int or token < 0 or (limit is not None and token >= limit):
            known = "" if limit is None else f" below the vocabulary's size {limit}"
            raise UserError(
                f"{where}: eos_token_id={tokens!r} must be a token or a list of tokens, but {token!r} is not an "
                f"integer from 0{known}. Correct it, or fetch the file again."
            )


def check_sizes(prefix: str, config: dict[str, Any], weights: Mapping[str, tuple[int, ...]]) -> None:
    """Check the sizes in config.json, from which transformers would build a model.

    Args:
        weights: shapes of the tensors in the model's files by name; empty if unknown.

    Raises:
        UserError: a size is not a positive integer, or is larger than the weights allow.
    """
    part = text_part(config)
    longest = max((size for shape in weights.values() for size in shape), default=None)
    most_layers = max(FEW_LAYERS, len(weights)) if weights else MOST_LAYERS
    for name in SIZES:
        size = part.get(name)
        if size is None or isinstance(size, list):
            continue
        if type(size) is not int or size <= 0:
            raise UserError(f"{prefix}: {name}={size!r} in config.json must be a positive integer. Restore the file.")
        limit = most_layers if name in LAYERS else longest
        if limit is not None and size > limit:
            raise UserError(
                f"{prefix}: {name}={size} in config.json is above {limit}, the most that its weights allow. Restore "
                "the file."
            )


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the text model in a config.json; a model of several modalities nests these settings."""
    text = config.get("text_config")
    return config | text if isinstance(text, dict) else config


def check_not_quantized(model_path: str, quantization: Any) -> None:
    if not quantization:
        return
    kind = quantization.get("quant_method") if isinstance(quantization, dict) else None
    raise UserError(
        f"model.path={model_path}: is quantized ({kind or 'quantization_config in its config.json'}), but a policy "
        "needs weights in float32 or bfloat16, even with adapters: rollouts would sample from merged weights that are "
        "rounded to the quantized type, not from the trained weights. Set model.path to the model before quantization."
    )


def check_positions(positions: int | None, max_prompt: int, max_response: int) -> None:
    """Raise UserError if prompts and responses of these lengths, in tokens, need more positions than the model has."""
    if positions is not None and max_prompt + max_response > positions:
        raise UserError(
            f"data.max_prompt_length={max_prompt} and data.max_response_length={max_response} need "
            f"{max_prompt + max_response} positions, but the model has {positions} (max_position_embeddings). "
            "Lower one of the two."
        )


def read_object(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file; None if the file is missing or unreadable, which other checks report."""
    if not path.is_file():  # reading a pipe would never end
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _check_architecture(setting: str, name: str, trust_remote_code: bool, table: str | None) -> None:
    config = read_object(Path(name).expanduser() / "config.json")
    if config is None or ("auto_map" in config and trust_remote_code):
        return
    prefix, kind = f"{setting}={name}", config.get("model_type")
    if not isinstance(kind, str):
        raise UserError(f"{prefix}: config.json has no model_type, which names the architecture. Restore the file.")
    if _lacks(KNOWN, kind):
        if "auto_map" in config:
            raise UserError(
                f"{prefix}: model_type {kind} is defined by code in the folder. If you trust the code, "
                "set model.trust_remote_code=true."
            )
        raise UserError(
            f"{prefix}: model_type {kind} is not supported by the installed transformers."
            f"{did_you_mean(nearest(kind, architectures(KNOWN)))} Update transformers (pip install -U transformers), "
            f"or set {setting} to another model."
        )
    if table is not None and _lacks(table, kind):
        raise UserError(
            f"{prefix}: model_type {kind} has no class that {_TASKS[table]} in the installed transformers. Set "
            f"{setting} to another model."
        )


def _labels(config: dict[str, Any]) -> int | None:
    """Return the number of labels in config.json; None if the setting may be inside `text_config`."""
    names, count = config.get("id2label"), config.get("num_labels")
    if isinstance(names, dict):
        return len(names)
    if isinstance(count, int):
        return count
    return None if "text_config" in config else 2


def _positions(config: dict[str, Any]) -> int | None:
    """Return the number of positions in config.json; None if config.json leaves the number to the architecture."""
    text = config.get("text_config")
    part = text if isinstance(text, dict) else config
    found = part.get("max_position_embeddings", part.get("n_positions"))
    return found if isinstance(found, int) else None


def _lacks(table: str, kind: str) -> bool:
    found = architectures(table)
    return bool(found) and kind not in found


@cache
def architectures(table: str) -> frozenset[str]:
    """Return the values of model_type in `table` of the installed transformers; empty without the table."""
    files = ("auto_mappings.py", "configuration_auto.py") if table == KNOWN else ("modeling_auto.py",)
    folder = _transformers() / "auto"
    text = "".join((folder / file).read_text(encoding="utf-8") for file in files if (folder / file).is_file())
    # The table, and the lines that add to the table.
    parts = re.findall(rf"^{table}(?:: [^\n]*)? = .*?^\)|^{table}\.update\(.*?^\)", text, re.DOTALL | re.MULTILINE)
    return frozenset(re.findall(r'"([^"\s]+)"(?=[,:])', "".join(parts)))


def _transformers() -> Path:
    """Return the folder of transformers' architectures."""
    spec = find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "models"
