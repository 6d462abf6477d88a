"""Loads tokenizers and policy, critic and reward models from a folder or Hub name; safetensors only."""

import copy
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as library_logging

from rlhf.errors import UserError
from rlhf.models.config_check import check_labels
from rlhf.models.hub_names import fetch
from rlhf.models.token_values import HEADS, value_class
from rlhf.storage.hf_layout import GENERATION_CONFIG, MODEL_CONFIG
from rlhf.storage.scratch import Scratch

log = logging.getLogger(__name__)

# Each rank loads several models, and transformers' progress bars would hide the trainer's own.
library_logging.disable_progress_bar()


@dataclass(frozen=True)
class ModelSource:
    """Location of a model, and options for loading. Messages begin with `setting`, the setting that names the model."""

    setting: str
    path: str
    revision: str | None = None
    trust_remote_code: bool = False
    attn_implementation: str = "sdpa"
    chat_template: str | None = None  # path of a Jinja file (`model.chat_template`)

    def __str__(self) -> str:
        return f"{self.setting}={self.path}"


@dataclass(frozen=True)
class ModelStart:
    """A model before its weights are loaded: source, local folder, architecture."""

    source: ModelSource
    folder: Path
    hf_config: PretrainedConfig


def resolve_path(source: ModelSource, weights: bool = True) -> Path:
    """Return the local folder of `source`; download a Hub name into the Hub's cache, with or without `weights`.

    Raises:
        UserError: the download fails.
    """
    local = Path(source.path).expanduser()
    if local.is_dir():
        return local
    return fetch(source.setting, source.path, source.revision, weights)


def load_tokenizer(source: ModelSource, folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of `folder`, replace its chat template if `source` has one, and set a padding token."""
    with _damage_as_user_error(source, "tokenizer", "Restore its files."):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=source.trust_remote_code)
    if source.chat_template is not None:
        template = Path(source.chat_template).expanduser()
        if not template.is_file():
            raise UserError(f"model.chat_template={source.chat_template} is not a file. Correct the path.")
        tokenizer.chat_template = template.read_text(encoding="utf-8-sig")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model_config(source: ModelSource, folder: Path) -> PretrainedConfig:
    """Load the architecture, with the dropouts of its config.json.

    Raises:
        UserError: config.json or generation_config.json is damaged. transformers ignores damage in the second file.
    """
    with _damage_as_user_error(source, "config.json", "Restore it."):
        hf_config = AutoConfig.from_pretrained(folder, trust_remote_code=source.trust_remote_code)
    with _damage_as_user_error(source, GENERATION_CONFIG, "Restore it, or remove it."):
        _generation_config(folder)
    return hf_config


@contextmanager
def _damage_as_user_error(source: ModelSource, what: str, remedy: str) -> Iterator[None]:
    """Raise UserError for any error of transformers, because a damaged file causes errors of any type.

    With `trust_remote_code`, only OSError, ValueError and ImportError become a UserError. Others propagate, because the
    model's own code may have raised them.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        raise UserError(f"{source} has no usable {what}: {error}. {remedy}") from error
    except ImportError as error:
        raise UserError(f"{source} has no usable {what}: {error}. Install the package.") from error
    except Exception as error:
        if source.trust_remote_code:
            raise
        raise UserError(f"{source} has no usable {what}: {type(error).__name__}: {error}. {remedy}") from error


def without_dropout(hf_config: PretrainedConfig) -> PretrainedConfig:
    """Set every dropout of `hf_config` to 0, and return `hf_config`."""
    return _with_values(hf_config, dict.fromkeys(_dropouts(hf_config), 0.0))


def _dropouts(hf_config: PretrainedConfig) -> dict[str, float]:
    return {name: value for name, value in hf_config.to_dict().items() if "drop" in name and isinstance(value, float)}


def _with_values(hf_config: PretrainedConfig, values: Mapping[str, float]) -> PretrainedConfig:
    for name, value in values.items():
        setattr(hf_config, name, value)
    return hf_config


def load_model(start: ModelStart, tensors: Mapping[str, Tensor] | None = None) -> PreTrainedModel:
    """Load a causal LM on the CPU in float32 from safetensors.

    Args:
        tensors: weights by their names in the files; every `load_...` function uses them instead of the weights files.

    Raises:
        UserError: a weight is missing, unreadable or has another shape, or `model.attn_implementation` is unsupported.
    """
    model, wrong = _load(AutoModelForCausalLM, start, tensors)
    _check_complete(start.source, wrong)
    return model


def empty_model(source: ModelSource, hf_config: PretrainedConfig) -> PreTrainedModel:
    """Return a causal LM of the architecture `hf_config` on the meta device."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(copy.deepcopy(hf_config), trust_remote_code=source.trust_remote_code)


def load_value_model(start: ModelStart, tensors: Mapping[str, Tensor] | None = None) -> PreTrainedModel:
    """Load a model with one value per token: `forward(input_ids=..., use_cache=False).logits` is [N, L, 1].

    A saved critic, or a reward model with one label, keeps its head. A causal LM gets a zero head: a random head would
    give the first steps meaningless values and advantages of arbitrary scale. `start.hf_config` stays unchanged; the
    model's `.config` has one label.

    Raises:
        UserError: the architecture has no value head, the head has several labels, or as in `load_model` for other
            weights.
    """
    source, hf_config = start.source, copy.deepcopy(start.hf_config)
    hf_config.num_labels = 1
    # Without this setting, the heads of some architectures have a dropout of 0.1.
    hf_config.classifier_dropout = 0.0
    found = value_class(hf_config)
    if found is None:
        raise UserError(
            f"{source}: its architecture ({hf_config.model_type}) cannot have a value head. Set a causal LM."
        )
    loader, names = found
    model, wrong = _load(loader, replace(start, hf_config=hf_config), tensors, key_mapping=names)
    heads = {name: shape for name, shape in wrong.items() if name.split(".")[0] in HEADS}
    for name, shape in heads.items():
        if shape is not None:
            raise UserError(
                f"{source}: its head has {shape[0]} labels ({name}), but a critic needs one. Set a causal LM, a saved "
                "critic or a reward model with one label."
            )
        torch.nn.init.zeros_(model.get_parameter(name))
    _check_complete(source, {name: shape for name, shape in wrong.items() if name not in heads})
    model.config.architectures = [type(model).__name__]
    return model


def load_reward_model(start: ModelStart, tensors: Mapping[str, Tensor] | None = None) -> PreTrainedModel:
    """Load a frozen sequence classifier: `forward(input_ids=..., attention_mask=...).logits` is [N, 1].

    Raises:
        UserError: transformers has no classifier of the architecture, the model has several labels, or as in
            `load_model`.
    """
    source, hf_config = start.source, start.hf_config
    known = type(hf_config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    if not known and AutoModelForSequenceClassification.__name__ not in getattr(hf_config, "auto_map", {}):
        raise UserError(
            f"{source}: {hf_config.model_type} has no sequence classifier in transformers. Set another model."
        )
    check_labels(str(source), hf_config.num_labels)
    model, wrong = _load(AutoModelForSequenceClassification, start, tensors)
    _check_complete(source, wrong)
    model.config.use_cache = False  # a text needs one pass only
    return model.requires_grad_(False).eval()


def _load(
    loader: Any, start: ModelStart, tensors: Mapping[str, Tensor] | None, **options: Any
) -> tuple[PreTrainedModel, dict[str, tuple[int, ...] | None]]:
    """Load a model and set its dropout to 0, because with dropout a policy's ratio to itself would not be 1.

    Also return the weights that were not loaded, by name: None if the files lack the weight, else its different shape
    in the files.
    """
    source, folder, hf_config = start.source, start.folder, without_dropout(copy.deepcopy(start.hf_config))
    # With None, transformers chooses sdpa, or eager for an architecture without sdpa, such as Gemma 2 (soft-capping).
    attention = None if source.attn_implementation == "sdpa" else source.attn_implementation
    options |= {"config": hf_config, "dtype": torch.float32, "attn_implementation": attention}
    # transformers initialises missing weights with a warning; we raise an error.
    options |= {"ignore_mismatched_sizes": True, "output_loading_info": True}
    try:
        with quiet_transformers():
            options["trust_remote_code"] = source.trust_remote_code
            if tensors is None:
                model, found = loader.from_pretrained(folder, use_safetensors=True, **options)
            else:
                kind, options["config"] = _class_for(loader, options)
                model, found = kind.from_pretrained(None, state_dict=dict(tensors), **options)
                if model.can_generate():
                    model.generation_config = _generation_config(folder)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{source} can't be loaded from safetensors: {error}. Restore its files.") from error
    except (ValueError, TypeError, ArithmeticError) as error:
        if attention is None or "Flash Attention" not in str(error):
            if source.trust_remote_code:
                raise
            reason = f"{type(error).__name__}: {error}"
            raise UserError(f"{source} can't be built from its config.json ({reason}). Restore the file.") from error
        raise UserError(
            f"model.attn_implementation={attention} is not supported by {source} ({hf_config.model_type}). Set "
            "model.attn_implementation=sdpa."
        ) from error
    if attention is None and model.config._attn_implementation != source.attn_implementation:
        log.info(
            "%s: %s has no %s in transformers, so model.attn_implementation=%s is used.",
            source,
            hf_config.model_type,
            source.attn_implementation,
            model.config._attn_implementation,
        )
    wrong: dict[str, tuple[int, ...] | None] = dict.fromkeys(sorted(found["missing_keys"]))
    return model, wrong | {name: tuple(shape) for name, shape, _ in sorted(found["mismatched_keys"])}


def _class_for(loader: Any, options: dict[str, Any]) -> tuple[Any, PretrainedConfig]:
    """Return the class that `loader` would load, and the part of the configuration that belongs to this class.

    `loader` is a model class or an Auto class of transformers.
    """
    if issubclass(loader, PreTrainedModel):
        return loader, options["config"]
    names = ("dtype", "attn_implementation", "trust_remote_code")
    with torch.device("meta"):
        model = loader.from_config(copy.deepcopy(options["config"]), **{name: options[name] for name in names})
    return type(model), model.config


def _generation_config(folder: Path) -> GenerationConfig:
    # Without generation_config.json, config.json has the tokens that end a response.
    name = GENERATION_CONFIG if os.path.lexists(folder / GENERATION_CONFIG) else MODEL_CONFIG
    return GenerationConfig.from_pretrained(folder, config_file_name=name)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hide warnings of transformers in the context."""
    verbosity = library_logging.get_verbosity()
    library_logging.set_verbosity_error()
    try:
        yield
    finally:
        library_logging.set_verbosity(verbosity)


def _check_complete(source: ModelSource, wrong: dict[str, tuple[int, ...] | None]) -> None:
    if wrong:
        raise UserError(
            f"{source}: {len(wrong)} weights that its config.json needs are missing from its safetensors "
            f"or have another shape there, such as {next(iter(wrong))}. Restore the folder."
        )


def hf_files(
    hf_config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    generation_config: Any,
    base: PretrainedConfig | None = None,
) -> dict[str, bytes]:
    """Return the small files of a Hugging Face folder by name, with which transformers opens an exported model.

    Args:
        hf_config: configuration of the model in training.
        base: configuration with the dropouts to write, because those of `hf_config` are 0 in training.
    """
    with Scratch() as scratch:
        _with_values(copy.deepcopy(hf_config), _dropouts(base or hf_config)).save_pretrained(scratch.folder)
        tokenizer.save_pretrained(scratch.folder)
        if generation_config is not None:
            generation_config.save_pretrained(scratch.folder)
        return {path.name: path.read_bytes() for path in sorted(scratch.folder.iterdir()) if path.is_file()}
