"""Adds LoRA adapters to a policy with peft, switches them off, and merges them into copies of the frozen weights."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf.config.schema.lora import ALL_LINEAR, LoraConfig
from rlhf.errors import UserError, did_you_mean, nearest
from rlhf.models.adapter_config import peft_settings
from rlhf.models.adapter_targets import chosen_layers, largest_rank, name_matches
from rlhf.models.merged_weight import merged_weight, output_norms
from rlhf.models.skeleton import cast_parameters

ADAPTER = "default"  # name of the only adapter of a model, peft's default
A, B, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"
"""Suffixes of an adapter's tensor names, as in peft's files."""
T = TypeVar("T")


class UpdateDropout(nn.Dropout):
    """Applies dropout only where autograd is enabled: in updates, not in log-prob passes."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) if torch.is_grad_enabled() else inputs


def add_adapters(model: PreTrainedModel, config: LoraConfig, base_dtype: torch.dtype) -> None:
    """Freeze the weights of `model`, cast them to `base_dtype`, and add float32 adapters on the meta device.

    Raises:
        UserError: as in `target_names`, or if peft would adapt layers that `config` does not select.
    """
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    targets = target_names(model, config)
    cast_parameters(model, base_dtype)
    # peft renames only adapted layers here, and draws no random numbers.
    inject_adapter_in_model(
        PeftConfig(**peft_settings(asdict(config)), target_modules=targets), model, low_cpu_mem_usage=True
    )
    # In transformers 4, the experts of Mixtral, Qwen2-MoE and others were linear layers. peft maps the names of these
    # layers to the fused experts. Dense layers may have these names, too, and then peft would adapt the experts.
    if others := sorted(_adapted(model).keys() ^ set(targets)):
        raise UserError(
            f"model.lora.target_modules={config.target_modules}: peft would adapt fused experts instead of layers of "
            f"{model.config.model_type} ({others[0]}). Exclude these layers: model.lora.exclude_modules="
            f"[{others[0].rpartition('.')[2]}]."
        )
    for module in _adapted(model).values():
        if config.dropout:
            module.lora_dropout[ADAPTER] = UpdateDropout(config.dropout)


def target_names(model: PreTrainedModel, config: LoraConfig) -> list[str]:
    """Return the names of the layers that `config` selects in `model`, which may be on the meta device.

    Raises:
        UserError: a name matches no module, a target is not linear or is the head, the settings exclude every layer, or
            the rank is too large for every layer.
    """
    layers = {name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    head = model.get_output_embeddings()
    linear = {name for name in layers if model.get_submodule(name) is not head}
    _modules_called(model, "exclude_modules", config.exclude_modules, linear)
    ends = [] if config.target_modules == ALL_LINEAR else list(config.target_modules)
    if wrong := sorted(_modules_called(model, "target_modules", ends, linear) - linear):
        what = f"a {type(model.get_submodule(wrong[0])).__name__}, and adapters are for linear layers"
        if wrong[0] in layers:
            what = "the head, which cannot have an adapter: log-probs are computed in chunks from its own weight"
        raise UserError(
            f"model.lora.target_modules={ends}: {wrong[0]} is {what}. Remove this name. Linear layers of the model "
            f"are {_last_parts(linear)}."
        )
    names = chosen_layers(config, linear)
    if not names:
        raise UserError(
            f"model.lora.exclude_modules={list(config.exclude_modules)}: excludes every layer that "
            "model.lora.target_modules selects. Exclude fewer layers."
        )
    _check_rank(model, config.rank, names)
    return names


def _check_rank(model: PreTrainedModel, rank: int, names: Iterable[str]) -> None:
    """Raise UserError if `rank` is too large for every weight. Some weights (experts' gates) may be too small."""
    shapes = {name: tuple(model.get_submodule(name).get_parameter("weight").shape) for name in names}
    if rank > (limit := largest_rank(shapes.values())):
        name = next(name for name, shape in shapes.items() if min(shape) == limit)
        raise UserError(
            f"model.lora.rank={rank}: the largest rank that a selected layer allows is {limit}, the smaller side of "
            f"{name} ({shapes[name][0]} x {shapes[name][1]}). Set model.lora.rank={limit} or lower."
        )


def _modules_called(model: PreTrainedModel, key: str, ends: Iterable[str], linear: set[str]) -> set[str]:
    found: set[str] = set()
    for end in ends:
        modules = {name for name, _ in model.named_modules() if name_matches(name, [end])}
        if not modules:
            near = did_you_mean(nearest(end, _last_parts(linear).split(", ")))
            raise UserError(
                f"model.lora.{key}={list(ends)}: {model.config.model_type} has no module called {end!r}.{near} Its "
                f"linear layers are {_last_parts(linear)}."
            )
        found |= modules
    return found


def _last_parts(names: Iterable[str]) -> str:
    return ", ".join(sorted({name.rpartition(".")[2] for name in names}))


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Switch off the adapters of `model` (or of an engine's wrapper) in the context: outputs then equal the base's."""
    layers = _adapted(model).values()
    # peft's own switch also changes `requires_grad`, which an engine must not see.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


@dataclass(frozen=True)
class AdaptedLayer:
    """Scale of a layer's adapter, and whether the layer's weight is [in, out] instead of [out, in]."""

    scaling: float
    transposed: bool


class Adapters:
    """Maps names of a model with adapters to names in checkpoints, and merges adapters into copies of the weights.

    In checkpoints, a frozen weight has its name from the model without adapters. The adapter of the weight `X.weight`
    has peft's names without peft's prefix: `X.lora_A.weight`, `X.lora_B.weight`, and with DoRA
    `X.lora_magnitude_vector`.
    """

    def __init__(self, layers: Mapping[str, AdaptedLayer]) -> None:
        self._layers = layers

    @classmethod
    def of(cls, model: nn.Module) -> "Adapters | None":
        """Return the adapters of `model`, or None if the model has none."""
        found = {
            name: AdaptedLayer(float(layer.scaling[ADAPTER]), bool(layer.fan_in_fan_out))
            for name, layer in _adapted(model).items()
        }
        return cls(found) if found else None

    def trained(self, named: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
        """Yield the adapters' entries of `named` (model name, value) under their names in checkpoints."""
        return ((own, value) for name, value in named if _is_adapter(own := checkpoint_name(name)))

    def base(self, named: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
        """Yield the frozen weights' entries of `named` under their names without adapters."""
        return ((own, value) for name, value in named if not _is_adapter(own := checkpoint_name(name)))

    def in_order(self, base: Mapping[str, T], trained: Mapping[str, T]) -> Iterator[tuple[str, T]]:
        """Yield `base` and `trained` in the order that `merged` needs: a layer's adapter before its weight."""
        for name, value in base.items():
            layer, _, kind = name.rpartition(".")
            if layer in self._layers and kind == "weight":
                yield from ((n, trained[n]) for end in (A, B, MAGNITUDE) if (n := f"{layer}.{end}") in trained)
            yield name, value

    @torch.no_grad()
    def merged(
        self, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield weights with adapters merged, by their names without adapters, cast to `dtype` or float32.

        The weight of an adapted layer becomes W + scaling * B A, or DoRA's rescaled sum, computed in float32.
        `tensors` are unsharded and in the order of `in_order`.
        """
        dtype = dtype or torch.float32
        parts: dict[str, Tensor] = {}
        for name, tensor in tensors:
            layer, _, kind = name.rpartition(".")
            if _is_adapter(name):
                parts[name] = tensor
            elif layer in self._layers and kind == "weight":
                own = {part.removeprefix(f"{layer}.").removesuffix(".weight"): parts[part] for part in parts}
                adapted = self._layers[layer]
                yield name, merged_weight(tensor, own, adapted.scaling, transposed=adapted.transposed).to(dtype)
                parts.clear()
            else:
                yield name, tensor.to(dtype) if tensor.is_floating_point() else tensor

    def norms(self, base: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield DoRA's initial magnitudes for the unsharded weights `base`, by the magnitudes' names in checkpoints."""
        for name, weight in base:
            layer, _, kind = name.rpartition(".")
            if layer in self._layers and kind == "weight":
                yield f"{layer}.{MAGNITUDE}", output_norms(weight.float(), transposed=self._layers[layer].transposed)


def checkpoint_name(name: str) -> str:
    """Return the name in checkpoints of a tensor of a model with adapters."""
    if ".lora_" not in name:
        return name.replace(".base_layer.", ".")
    return name.replace(f".{ADAPTER}", "").replace(f"{MAGNITUDE}.weight", MAGNITUDE)


def _is_adapter(name: str) -> bool:
    return ".lora_" in name


def _adapted(model: nn.Module) -> dict[str, Any]:
    """Return the adapted layers by name, without the prefix of an engine's wrapper module."""
    inner = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), model)
    return {name: module for name, module in inner.named_modules() if hasattr(module, "lora_A")}
