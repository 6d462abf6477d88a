"""Class for each architecture that gives one number per token, for value models."""

from typing import Any

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GenericForTokenClassification

HEADS = ("score", "classifier")
"""Names that the library gives the head: `score` in its sequence classifiers and newer token classifiers, `classifier`
in older ones."""


def value_class(hf_config: PretrainedConfig) -> tuple[Any, dict[str, str] | None] | None:
    """A class to call `from_pretrained` of, and which names of the file mean others in it; None if the architecture is
    no causal LM's.

    It is the library's token classifier. Where the library has none (of 5.23: OLMo, Gemma 3, Granite and more), it is
    the library's mixin over the architecture's base class, which only this package can open again.
    """
    kind: Any = type(hf_config)
    if AutoModelForTokenClassification.__name__ in getattr(hf_config, "auto_map", {}):
        return AutoModelForTokenClassification, None
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    if kind in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING:
        library_s: Any = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING[kind]
        older = not issubclass(library_s, GenericForTokenClassification)
        return AutoModelForTokenClassification, {r"^score\.": "classifier."} if older else None
    if kind not in MODEL_MAPPING:
        return None
    trunk: Any = MODEL_MAPPING[kind]
    base = next(c for c in reversed(trunk.__mro__) if issubclass(c, PreTrainedModel) and c is not PreTrainedModel)
    name = trunk.__name__.removesuffix("Model") + "ForTokenClassification"
    members = {"base_model_prefix": base.base_model_prefix, "config_class": kind, "__module__": __name__}
    return type(name, (GenericForTokenClassification, base), members), None
