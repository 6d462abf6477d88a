"""Check of the settings of adapters against the layers of the model, before any rank starts."""

import math
from collections.abc import Iterable
from dataclasses import replace

from rlhf.config import BackendConfig, LoraConfig, ModelConfig
from rlhf.config.schema.lora import ALL_LINEAR
from rlhf.planning.adapter_state import adapted, named_so
from rlhf.planning.model_shapes import ROOT, ModelShapes, is_head


def check_adapters(model: ModelConfig, shapes: ModelShapes) -> None:
    """Raise UserError for adapters that the policy of `shapes` cannot have: see `target_names`, which the ranks ask.

    Most settings are right by the names in the files' headers. Only where they are not is the model built on the meta
    device, which imports torch: its names may be others than those of the files.
    """
    if model.lora.enabled and not model.trust_remote_code and not _fits(model.lora, shapes):
        from rlhf.models.adapter_layers import target_names
        from rlhf.planning.meta_shapes import meta_model

        target_names(meta_model("model.path", model.path, model.revision), model.lora)


def _fits(lora: LoraConfig, shapes: ModelShapes) -> bool:
    """Whether by the names of the weights every name of the settings is one, all targets are linear layers, and the
    rank is one that they can have."""
    linear = {
        name.removesuffix(".weight")
        for unit, weights in shapes.units.items()
        for name, shape in weights.items()
        if unit != ROOT and len(shape) == 2 and name.endswith(".weight") and not is_head(name)
    }
    modules = {name.rpartition(".")[0] for name in shapes.weights}
    modules |= {".".join(parts[:end]) for parts in (name.split(".") for name in modules) for end in range(len(parts))}
    targets = [] if lora.target_modules == ALL_LINEAR else lora.target_modules
    if not all(_meant(modules, [end]) for end in (*targets, *lora.exclude_modules)):
        return False
    if not _meant(modules, targets) <= linear:
        return False
    # Of rank 1 a factor has as many elements as the side of the weight that it is at.
    chosen = adapted(shapes, replace(lora, rank=1, use_dora=False), BackendConfig()).trained
    sides = list(map(math.prod, chosen.values()))
    return lora.rank <= max((min(pair) for pair in zip(sides[::2], sides[1::2], strict=True)), default=0)


def _meant(modules: Iterable[str], ends: list[str]) -> set[str]:
    return {module for module in modules if named_so(module, ends)}
