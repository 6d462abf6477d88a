"""Counts the memory of a policy with adapters (LoRA): their shapes, and the state of the frozen base."""

import math
from dataclasses import dataclass

from rlhf.config import BackendConfig, LoraConfig
from rlhf.config.derived import base_dtype
from rlhf.config.schema.lora import ALL_LINEAR
from rlhf.models.adapter_config import FAN_IN_FAN_OUT
from rlhf.models.adapter_targets import chosen_layers
from rlhf.planning.activations import TokenCost
from rlhf.planning.model_shapes import ROOT, ModelShapes, Shapes, is_head
from rlhf.planning.training_state import (
    WIDTHS,
    TrainingState,
    compute_width,
    elements,
    gathered,
    sharded,
    stays_plain,
    summed_bucket,
    zero_state,
)
from rlhf.planning.zero_shares import MOMENTS, ZeroShares, live_weights


@dataclass(frozen=True)
class Adapted:
    """A frozen base and its float32 adapters, by unit as in `ModelShapes.units`."""

    base: ModelShapes
    lora: LoraConfig
    base_width: int
    """Bytes per weight of the base."""
    units: dict[str, Shapes]
    linear: list[tuple[int, int]]
    """Columns and rows of the adapted weights in the layer with the largest adapters."""

    @property
    def trained(self) -> Shapes:
        return {name: shape for unit in self.units.values() for name, shape in unit.items()}

    @property
    def count(self) -> int:
        return elements(self.trained)

    @property
    def in_layer(self) -> int:
        """Return the largest number of trained weights in a unit."""
        return max(map(elements, self.units.values()), default=0)

    def token_cost(self, width: int) -> TokenCost:
        """Return the adapters' cost per token and layer, in a pass in a dtype of `width` bytes.

        Autograd keeps the output of A, and tensors of dropout and DoRA. The largest output of an adapter is transient.
        """
        kept = transient = 0
        # With a 16-bit base in a float32 pass, the input is cast for the adapter.
        cast = 4 if width == 4 and self.base_width == 2 else 0
        for columns, rows in self.linear:
            kept += self.lora.rank * width + cast * columns
            kept += (width + 1) * columns if self.lora.dropout else 0
            kept += 2 * width * rows if self.lora.use_dora else 0
            transient = max(transient, 2 * width * rows)
        return TokenCost(kept, transient)

    def dora_weights(self) -> int:
        """Return the bytes of DoRA's transient weights: three float32 copies of the largest adapted weight."""
        largest = max((columns * rows for columns, rows in self.linear), default=0)
        return 4 * 3 * largest if self.lora.use_dora else 0


def adapted(model: ModelShapes, lora: LoraConfig, backend: BackendConfig) -> Adapted:
    """Return `model` as a frozen base, with the adapters that `lora` selects."""
    width = WIDTHS[base_dtype(lora, backend)]
    units: dict[str, Shapes] = {}
    linear: dict[str, list[tuple[int, int]]] = {}
    for unit, weights in model.units.items():
        found: dict[str, tuple[int, ...]] = {}
        layers = linear_layers(weights)
        # Skip the root: its embedding has the name of a linear layer's weight.
        skip = unit == ROOT and lora.target_modules == ALL_LINEAR
        for module in [] if skip else chosen_layers(lora, layers):
            shape = layers[module]
            rows, columns = shape[::-1] if model.config.get("model_type") in FAN_IN_FAN_OUT else shape
            linear.setdefault(unit, []).append((columns, rows))
            found |= {f"{module}.lora_A": (lora.rank, columns), f"{module}.lora_B": (rows, lora.rank)}
            if lora.use_dora:
                found[f"{module}.lora_magnitude_vector"] = (rows,)
        units[unit] = found
    most = max(linear.values(), key=lambda pairs: sum(columns + rows for columns, rows in pairs), default=[])
    return Adapted(model, lora, width, units, most)


def linear_layers(weights: Shapes) -> Shapes:
    """Return the shapes of the matrices among `weights`, without the head's, by layer name."""
    matrices = {name: shape for name, shape in weights.items() if len(shape) == 2 and name.endswith(".weight")}
    return {name.removesuffix(".weight"): shape for name, shape in matrices.items() if not is_head(name)}


def adapted_state(policy: Adapted, config: BackendConfig, ranks: int) -> TrainingState:
    """Return the memory of the policy in training, like `trained_state` for a model without adapters."""
    if config.name == "deepspeed":
        return _deepspeed(policy, config, ranks)
    if stays_plain(config, ranks, policy.base_width):
        base, trained = 4 * policy.base.count, 4 * policy.count
        layer = 4 * policy.in_layer + policy.dora_weights()
        bucket = summed_bucket(policy.count, ranks)
        return TrainingState(base + trained, MOMENTS * trained, trained, layer=layer, step_temporaries=bucket)
    return _fsdp2(policy, config, ranks // config.replicas)


def _fsdp2(policy: Adapted, config: BackendConfig, ranks: int) -> TrainingState:
    base, width = policy.base, compute_width(config)
    trained = sharded(policy.trained, ranks)
    in_layer = policy.in_layer
    base_width, own_width = (2, 2) if config.autocast == "bfloat16" else (policy.base_width, 4)
    unit_bytes = {
        unit: base_width * elements(weights) + own_width * elements(policy.units[unit])
        for unit, weights in base.units.items()
    }
    return TrainingState(
        policy.base_width * sharded(base.weights, ranks) + 4 * trained,
        4 * MOMENTS * trained,
        4 * trained,
        gathered(base, unit_bytes, config, ranks),
        layer=(8 + width) * in_layer + 4 * math.ceil(in_layer / ranks) + policy.dora_weights(),
    )


def _deepspeed(policy: Adapted, config: BackendConfig, ranks: int) -> TrainingState:
    width, count, stage = compute_width(config), policy.count, config.zero_stage
    base = (2 if config.autocast == "bfloat16" else policy.base_width) * policy.base.count
    whole = base + width * count
    return zero_state(
        ZeroShares(count, stage, width, ranks),
        config,
        weights=math.ceil(whole / ranks) if stage == 3 else whole,
        gathered=live_weights(whole, policy.base.count + count, stage, ranks),
        while_building=0 if stage == 3 else policy.base_width * policy.base.count,
        layer=width * policy.in_layer + policy.dora_weights(),
    )
