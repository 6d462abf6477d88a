"""Finds an architecture's class for value models: one output per token."""

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
"""Names of the head in transformers: `score` in sequence classifiers and newer token classifiers, `classifier` in older
token classifiers."""


def value_class(hf_config: PretrainedConfig) -> tuple[Any, dict[str, str] | None] | None:
    """Return a class for `from_pretrained` and its `key_mapping`; None if the architecture has no causal LM.

    The class is transformers' token classifier. For architectures without one (in 5.23: OLMo, Gemma 3, Granite and
    more), the class is transformers' mixin over the base class, and only this package can open the saved model.
    """
    kind: Any = type(hf_config)
    if AutoModelForTokenClassification.__name__ in getattr(hf_config, "auto_map", {}):
        return AutoModelForTokenClassification, None
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    if kind in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING:
        classifier: Any = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING[kind]
        older = not issubclass(classifier, GenericForTokenClassification)
        return AutoModelForTokenClassification, {r"^score\.": "classifier."} if older else None
    if kind not in MODEL_MAPPING:
        return None
    trunk: Any = MODEL_MAPPING[kind]
    base = next(c for c in reversed(trunk.__mro__) if issubclass(c, PreTrainedModel) and c is not PreTrainedModel)
    name = trunk.__name__.removesuffix("Model") + "ForTokenClassification"
    members = {"base_model_prefix": base.base_model_prefix, "config_class": kind, "__module__": __name__}
    return type(name, (GenericForTokenClassification, base), members), None
