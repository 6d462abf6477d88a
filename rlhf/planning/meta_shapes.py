"""Builds models on the meta device, from config.json alone."""

import torch
from huggingface_hub import constants
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from rlhf.errors import UserError
from rlhf.models.config_check import check_sizes, read_object
from rlhf.models.folder_check import check_small_files
from rlhf.models.parameter_count import model_folder
from rlhf.planning.model_shapes import ModelShapes, read_config


def shapes_from_config(
    setting: str, path: str, revision: str | None = None, *, classifier: bool = False
) -> ModelShapes:
    """Return the shapes of `meta_model`, with the same errors."""
    model = meta_model(setting, path, revision, classifier=classifier)
    folder = model_folder(path, revision)
    config = None if folder is None else read_config(folder)
    return ModelShapes({name: tuple(p.shape) for name, p in model.named_parameters()}, config or {})


def meta_model(setting: str, path: str, revision: str | None = None, *, classifier: bool = False) -> PreTrainedModel:
    """Build the model of config.json in a folder or the Hub's cache, on the meta device. Run no code of the model.

    Raises:
        UserError: the folder does not exist, its JSON files are damaged, or transformers lacks the architecture.
    """
    folder = model_folder(path, revision)
    if folder is None:
        offline = " HF_HUB_OFFLINE forbids this download: unset it first." if constants.HF_HUB_OFFLINE else ""
        raise UserError(
            f"{setting}={path} is neither a folder nor in this machine's Hub cache. The plan needs only its "
            f"config.json: run `hf download {path} config.json --local-dir DIR` and set {setting}=DIR.{offline}"
        )
    prefix = f"{setting}={path}"
    check_small_files(prefix, folder, tokenizer=False)
    check_sizes(prefix, read_object(folder / "config.json") or {}, {})
    kind = AutoModelForSequenceClassification if classifier else AutoModelForCausalLM
    try:
        with torch.device("meta"):
            model: PreTrainedModel = kind.from_config(AutoConfig.from_pretrained(folder))
    except Exception as error:  # a damaged config.json causes errors of any type
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(
            f"{prefix}: {reason} Correct its config.json, or set a model that this version of transformers supports."
        ) from error
    return model
