"""Reads the small files of a Hugging Face folder: configs, tokenizer, chat template. Imports no torch."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf.errors import UserError
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.hf_layout import MODEL_CONFIG
from rlhf.storage.reading import read_regular

SUFFIXES = (".json", ".jinja", ".model", ".txt", ".py")
"""Suffixes of a model's files other than its weights. Python files are copied and never run."""
TEMPLATES = "additional_chat_templates"
TEMPLATE, TOKENIZER_CONFIG = "chat_template.jinja", "tokenizer_config.json"
LARGEST = 1 << 30
NOT_OF_A_MODEL = ("adapter_config.json", "trainer_state.json", "fsdp_config.json", "README.txt")
"""Files that have one of `SUFFIXES`, but do not belong to the model."""


def is_small_file(name: str) -> bool:
    """Return whether a file, by its path in a model's folder, belongs to the model but is not its weights."""
    path = Path(name)
    belongs = path.suffix in SUFFIXES and not name.endswith(".index.json") and path.name not in NOT_OF_A_MODEL
    return belongs and path.parent in (Path(), Path(TEMPLATES))


def folder_with_config(*folders: Path) -> Path | None:
    """Return the first of `folders` that has a config.json."""
    return next((folder for folder in folders if (folder / MODEL_CONFIG).is_file()), None)


def read_small_files(folder: Path) -> dict[str, bytes]:
    """Return the small files of `folder` by name; raise UserError if it cannot be read or has no valid config.json."""
    try:
        names = [str(p.relative_to(folder)) for p in sorted([*folder.iterdir(), *folder.glob(f"{TEMPLATES}/*")])]
        found = {name: read_regular(folder / name, LARGEST) for name in names if is_small_file(name)}
    except (OSError, DamagedCheckpoint) as error:
        raise UserError(f"{folder} cannot be read: {error}. Name the model's folder with --hf_model_path.") from None
    parse_model_config(found, folder)
    return found


def parse_model_config(files: Mapping[str, bytes], folder: Path) -> dict[str, Any]:
    """Return the parsed config.json of `files`, read from `folder`; raise UserError if it is missing or invalid."""
    if MODEL_CONFIG not in files:
        raise UserError(f"{folder} has no {MODEL_CONFIG}. Name the model's folder with --hf_model_path.")
    try:
        config = json.loads(files[MODEL_CONFIG])
    except (ValueError, RecursionError) as error:
        raise UserError(f"{folder / MODEL_CONFIG} is not JSON: {error}. Restore it.") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise UserError(f"{folder / MODEL_CONFIG} has no model_type. Name another folder with --hf_model_path.")
    return config


def with_chat_template(files: Mapping[str, bytes], template: bytes) -> dict[str, bytes]:
    """Return `files` with another chat template, in chat_template.jinja and no longer in the tokenizer's config."""
    result = dict(files) | {TEMPLATE: template}
    if TOKENIZER_CONFIG in result:
        settings = json.loads(result[TOKENIZER_CONFIG])
        settings.pop("chat_template", None)
        result[TOKENIZER_CONFIG] = (json.dumps(settings, indent=2, ensure_ascii=False) + "\n").encode()
    return result
