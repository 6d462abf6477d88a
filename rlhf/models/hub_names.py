"""Downloads models by their Hub names into the Hugging Face cache, and checks the names before anything loads."""

from pathlib import Path

from rlhf.errors import UserError

# Pickled weights (.bin, .pt) are never fetched or read.
HUB_PATTERNS = ["*.json", "*.txt", "*.model", "*.jinja"]
HUB_WEIGHTS = "*.safetensors"


def check_name(setting: str, name: str, revision: str | None) -> None:
    """Download the small files of a model that is neither a folder nor in the Hub's cache. Raises like `fetch`."""
    if Path(name).expanduser().is_dir():
        return
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, "config.json", revision=revision)
    except HFValidationError:
        cached = None  # `fetch` reports the error
    if not isinstance(cached, str):
        fetch(setting, name, revision, weights=False)


def fetch(setting: str, name: str, revision: str | None, weights: bool) -> Path:
    """Download a model, with or without weights, and return its folder in the cache. Raises UserError on failure."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    prefix = f"{setting}={name}"
    try:
        wanted = [*HUB_PATTERNS, HUB_WEIGHTS] if weights else HUB_PATTERNS
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=wanted, etag_timeout=10))
    except HFValidationError:
        raise UserError(f"{prefix} is neither a folder nor a Hub name of the form org/name. Correct it.") from None
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise UserError(
            f"{prefix} (revision {revision}) is not a local folder, and the Hub has no such model or requires a login: "
            f"{str(error).splitlines()[0].rstrip('.')}. Correct the name, or log in with `hf auth login`."
        ) from None
    except (LocalEntryNotFoundError, OSError) as error:
        if constants.HF_HUB_OFFLINE:
            raise UserError(
                f"{prefix} is neither a local folder nor in this machine's Hub cache, and HF_HUB_OFFLINE or "
                "TRANSFORMERS_OFFLINE forbids the download. Unset the variable, or set a local folder."
            ) from None
        raise UserError(
            f"{prefix} is not a local folder, and the Hub can't be reached ({type(error).__name__}). Set a local "
            "folder, or download the model on a machine with network access and set HF_HOME."
        ) from None
    if weights and not any(folder.glob(HUB_WEIGHTS)):
        raise UserError(
            f"{prefix}: the Hub has no safetensors of this model. Pickled weights can run code and are not downloaded. "
            f"Run `hf download {name} --local-dir DIR` and set {setting}=DIR. The trainer then prints the command that "
            "converts the weights."
        )
    return folder
