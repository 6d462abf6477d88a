"""Checks adapter settings against the model's layers, before any rank starts."""

from rlhf.config import LoraConfig, ModelConfig
from rlhf.config.schema.lora import ALL_LINEAR
from rlhf.models.adapter_targets import chosen_layers, largest_rank, name_matches
from rlhf.planning.adapter_state import linear_layers
from rlhf.planning.model_shapes import ROOT, ModelShapes


def check_adapters(model: ModelConfig, shapes: ModelShapes) -> None:
    """Raise UserError for adapters that do not fit the policy of `shapes`; see `target_names`, which the ranks call.

    The names in the files' headers suffice to accept most settings. Otherwise build the model on the meta device, which
    imports torch, because the model's names may differ from the names in the files.
    """
    if model.lora.enabled and not model.trust_remote_code and not _fits(model.lora, shapes):
        from rlhf.models.adapter_layers import target_names
        from rlhf.planning.meta_shapes import meta_model

        target_names(meta_model("model.path", model.path, model.revision), model.lora)


def _fits(lora: LoraConfig, shapes: ModelShapes) -> bool:
    """Return whether the weight names in the files show that the adapter settings fit.

    All names in the settings must exist, all targets must be linear, and the rank must be possible.
    """
    linear: dict[str, tuple[int, ...]] = {}
    for unit, weights in shapes.units.items():
        linear |= {} if unit == ROOT else linear_layers(weights)
    modules = {name.rpartition(".")[0] for name in shapes.weights}
    modules |= {".".join(parts[:end]) for parts in (name.split(".") for name in modules) for end in range(len(parts))}
    ends = [] if lora.target_modules == ALL_LINEAR else lora.target_modules
    if not all(any(name_matches(module, [end]) for module in modules) for end in (*ends, *lora.exclude_modules)):
        return False
    if not {module for module in modules if name_matches(module, ends)} <= linear.keys():
        return False
    return lora.rank <= largest_rank(linear[name] for name in chosen_layers(lora, linear))
