"""Models of which only config.json is looked at: the library builds them on the meta device."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from rlhf.errors import UserError
from rlhf.models.parameter_count import model_folder
from rlhf.planning.model_shapes import ModelShapes, read_config


def of_config(setting: str, path: str, revision: str | None = None, *, classifier: bool = False) -> ModelShapes:
    """The shapes of the `meta_model` of these arguments.

    Raises:
        UserError: see there.
    """
    model = meta_model(setting, path, revision, classifier=classifier)
    folder = model_folder(path, revision)
    config = None if folder is None else read_config(folder)
    return ModelShapes({name: tuple(p.shape) for name, p in model.named_parameters()}, config or {})


def meta_model(setting: str, path: str, revision: str | None = None, *, classifier: bool = False) -> PreTrainedModel:
    """The model that config.json of a folder, or of the Hub's cache, describes, without memory for its weights; no code
    that comes with it is run.

    Raises:
        UserError: it is not there, or the library does not know its architecture.
    """
    folder = model_folder(path, revision)
    if folder is None:
        raise UserError(
            f"{setting}={path}: neither a folder nor in the Hub's cache of this machine. For a plan its config.json is "
            f"enough: `hf download {path} config.json --local-dir DIR`, then {setting}=DIR."
        )
    kind = AutoModelForSequenceClassification if classifier else AutoModelForCausalLM
    try:
        with torch.device("meta"):
            model: PreTrainedModel = kind.from_config(AutoConfig.from_pretrained(folder))
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{setting}={path}: {str(error).splitlines()[0]}") from error
    return model
