"""From `model.path` to a tokenizer and a causal LM, without ever running code that came with the files."""

import tempfile
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from rlhf.config import ModelConfig
from rlhf.errors import UserError

# Several models are loaded per rank; their bars would drown the run's own progress.
disable_progress_bar()
# Pickled weights (.bin, .pt) are never fetched or read.
HUB_PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
SAMPLE_BYTES = 1 << 20
SAMPLES = 16


def resolve_path(config: ModelConfig) -> Path:
    """The local folder that `model.path` means; a Hub name is downloaded into the Hub's cache. Raises UserError when it can't be had."""
    local = Path(config.path).expanduser()
    if local.is_dir():
        return local
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return Path(
            snapshot_download(config.path, revision=config.revision, allow_patterns=HUB_PATTERNS, etag_timeout=10)
        )
    except HFValidationError:
        raise UserError(f"model.path={config.path} is neither a folder nor a Hub name of the form org/name.") from None
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise UserError(
            f"model.path={config.path} (revision {config.revision}) is no local folder and the Hub does not know it, or asks for a login "
            f"(`hf auth login`): {str(error).splitlines()[0]}"
        ) from None
    except (LocalEntryNotFoundError, OSError) as error:
        raise UserError(
            f"model.path={config.path} is no local folder, and the Hub can't be reached ({type(error).__name__}). Give a local folder, "
            "or download it on a machine with network access and set HF_HOME."
        ) from None


def load_tokenizer(config: ModelConfig, folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of `folder`, with `model.chat_template` in place if set, and a padding token."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        raise UserError(f"model.path={config.path} has no usable tokenizer: {error}") from error
    if config.chat_template is not None:
        template = Path(config.chat_template).expanduser()
        if not template.is_file():
            raise UserError(f"model.chat_template={config.chat_template} is not a file.")
        tokenizer.chat_template = template.read_text()
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model_config(config: ModelConfig, folder: Path) -> PretrainedConfig:
    """The architecture, every dropout off: with dropout the ratio of a policy to itself would not be 1."""
    try:
        hf_config = AutoConfig.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        raise UserError(f"model.path={config.path} has no usable config.json: {error}") from error
    for name, value in hf_config.to_dict().items():
        if "drop" in name and isinstance(value, float):
            setattr(hf_config, name, 0.0)
    return hf_config


def load_model(config: ModelConfig, folder: Path, hf_config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The weights of `folder` (safetensors only) as a causal LM on the CPU in `dtype`."""
    options: dict[str, Any] = {"config": hf_config, "dtype": dtype, "attn_implementation": config.attn_implementation}
    # The library makes up what a file lacks and tells it in a warning; here it is told as a mistake.
    options |= {"ignore_mismatched_sizes": True, "output_loading_info": True}
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, use_safetensors=True, trust_remote_code=config.trust_remote_code, **options
        )
    except (OSError, SafetensorError) as error:
        raise UserError(f"model.path={config.path} can't be loaded from safetensors: {error}") from error
    model, found = loaded
    if lost := sorted(found["missing_keys"]) + sorted(name for name, *_ in found["mismatched_keys"]):
        raise UserError(
            f"model.path={config.path}: {len(lost)} weights that its config.json asks for are missing from its safetensors "
            f"or have another shape, such as {lost[0]}. Restore the folder."
        )
    return model


def fingerprint(folder: Path) -> str:
    """A hash that tells whether a resume starts from the same model files: names, sizes and content.

    Of a file above 16 MiB, 16 evenly spaced blocks of 1 MiB are read: training changes every tensor, so a sample shows it.
    """
    digest = xxhash.xxh3_128()
    for path in sorted(
        p for p in folder.iterdir() if p.suffix in (".json", ".safetensors", ".jinja", ".model", ".txt")
    ):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            if size <= SAMPLES * SAMPLE_BYTES:
                digest.update(file.read())
                continue
            for i in range(SAMPLES):
                file.seek((size - SAMPLE_BYTES) * i // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def hf_files(
    hf_config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, generation_config: Any
) -> dict[str, bytes]:
    """The small files of a Hugging Face folder, by name, so that an exported model opens like any other."""
    with tempfile.TemporaryDirectory() as scratch:
        hf_config.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        if generation_config is not None:
            generation_config.save_pretrained(scratch)
        return {path.name: path.read_bytes() for path in sorted(Path(scratch).iterdir()) if path.is_file()}
