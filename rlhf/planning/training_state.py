"""Counts the memory of a sharded model: weights, gradients, optimizer, and transients of the training engine."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rlhf.config import BackendConfig
from rlhf.config.buffer_sizes import GRADIENT_BUCKET
from rlhf.config.derived import compute_dtype
from rlhf.planning.model_shapes import ROOT, ModelShapes, Shapes
from rlhf.planning.zero_shares import MOMENTS, ZeroShares, live_weights

WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per value."""


@dataclass(frozen=True)
class TrainingState:
    """Bytes on one rank's device, except for `host`."""

    weights: int
    optimizer: int = 0
    gradients: int = 0
    """Gradients from the first backward pass of an optimizer step to the end of the step."""
    gathered: int = 0
    """Gathered (whole) weights in a pass, with the all-gather's buffer."""
    head: int = 0
    """The head's gradient with the buffers of its reduction."""
    head_left: int = 0
    """Part of `head` that stays during the layers' backward pass."""
    layer: int = 0
    """A layer's gradients with the buffers of their reduction."""
    root: int = 0
    """After the layers' backward pass: the embedding's weights and gradients, with the buffers of the reduction."""
    micro_batch_gradients: int = 0
    """DeepSpeed's gradients of the current micro-batch, in addition to the sum over earlier micro-batches."""
    step_temporaries: int = 0
    """Temporaries of DeepSpeed's optimizer step, or a bucket of gradients that replicas sum; the fused AdamW has
    none."""
    while_building: int = 0
    """Whole weights that exist while the engine is built; 0 with ZeRO 3."""
    permanent: int = 0
    """DeepSpeed's permanent buffers; some of them hold gradients (see `ZeroShares.permanent`)."""
    host: int = 0
    """Offloaded state on the host."""


def compute_width(config: BackendConfig) -> int:
    return WIDTHS[compute_dtype(config)]


def sharded(weights: Shapes, ranks: int) -> int:
    """Return the number of elements on the first of `ranks` under FSDP2, which splits rows as torch.chunk does."""
    return sum(math.ceil(shape[0] / ranks) * math.prod(shape[1:]) if shape else 1 for shape in weights.values())


def frozen_state(model: ModelShapes, config: BackendConfig, dtype: str, ranks: int) -> TrainingState:
    """Return the memory of a model without an optimizer, whose weights have `dtype`.

    FSDP2 shards such models, even with backend=deepspeed.
    """
    width = WIDTHS[dtype]
    if stays_plain(config, ranks, width):
        return TrainingState(width * model.count)
    ranks //= config.replicas
    return TrainingState(width * sharded(model.weights, ranks), gathered=_gathered(model, config, ranks))


def trained_state(model: ModelShapes, config: BackendConfig, ranks: int) -> TrainingState:
    """Return the memory of a model in training, with the engine that `config` names."""
    if config.name == "deepspeed":
        return _deepspeed(model, config, ranks)
    if stays_plain(config, ranks, WIDTHS["float32"]):
        return _plain(model, ranks)
    return _fsdp2(model, config, ranks // config.replicas)


def stays_plain(config: BackendConfig, ranks: int, width: int) -> bool:
    """Return whether weights of `width` bytes are used without FSDP2 (see `rlhf.backends.fsdp2.stays_plain`)."""
    return ranks == config.replicas and compute_width(config) == width == WIDTHS["float32"]


def summed_bucket(count: int, ranks: int) -> int:
    """Return the bytes of the bucket in which `ranks` replicas sum the gradients of `count` weights."""
    return min(4 * count, GRADIENT_BUCKET) if ranks > 1 else 0


def elements(weights: Shapes) -> int:
    return sum(map(math.prod, weights.values()))


def gathered(model: ModelShapes, units: Mapping[str, int], config: BackendConfig, ranks: int) -> int:
    """Return the bytes of gathered weights in a pass of FSDP2; `units` has the bytes of each unit.

    Without `reshard_after_forward`, all units stay gathered. Otherwise the root, a unit and the next unit are gathered
    at the same time, and with two or more ranks there is also the flat all-gather buffer
    (torch.distributed.fsdp._fully_shard._fsdp_collectives).
    """
    if not config.reshard_after_forward:
        return sum(units.values())
    root = units[ROOT]
    # A unit and the next unit are two layers, or the last layer and the head.
    layer = max((units[name] for name in model.layer_names), default=0)
    unit = max((size for name, size in units.items() if name != ROOT), default=0)
    arriving = unit if ranks > 1 else 0
    return root + max(layer + unit + arriving, root if ranks > 1 else 0)


def _gathered(model: ModelShapes, config: BackendConfig, ranks: int) -> int:
    width = compute_width(config)
    return gathered(model, {name: width * elements(unit) for name, unit in model.units.items()}, config, ranks)


def _plain(model: ModelShapes, ranks: int) -> TrainingState:
    root, head = elements(model.units[ROOT]), math.prod(model.head)
    return TrainingState(
        4 * model.count,
        4 * MOMENTS * model.count,
        4 * model.count,
        # A micro-batch's gradients stay until they are added to the sum. A tied head's gradient stays until the
        # embedding's gradient is added to it.
        head=4 * head,
        head_left=4 * head,
        layer=4 * max(map(elements, model.layers), default=0),
        root=4 * root if model.has_own_head else 8 * root,
        step_temporaries=summed_bucket(model.count, ranks),
    )


def _fsdp2(model: ModelShapes, config: BackendConfig, ranks: int) -> TrainingState:
    width, root = compute_width(config), elements(model.units[ROOT])
    layer = max(map(elements, model.layers), default=0)
    shards = sharded(model.weights, ranks)
    head = math.prod(model.head)
    own = head if model.has_own_head else 0
    return TrainingState(
        4 * shards,
        4 * MOMENTS * shards,
        4 * shards,
        _gathered(model, config, ranks),
        # Each sum below has the gradients in the dtype of the pass, a flat float32 buffer (freed when the next unit's
        # buffer exists), and this rank's shard of the buffer. A tied head is reduced with the root.
        head=(4 + width) * head + 4 * math.ceil(own / ranks),
        head_left=4 * own or width * head,
        layer=(8 + width) * layer + 4 * math.ceil(layer / ranks),
        root=(4 + 2 * width) * root + 4 * math.ceil(root / ranks),
    )


def _deepspeed(model: ModelShapes, config: BackendConfig, ranks: int) -> TrainingState:
    width, count, stage = compute_width(config), model.count, config.zero_stage
    zero = ZeroShares(count, stage, width, ranks)
    head = math.prod(model.head)
    return zero_state(
        zero,
        config,
        weights=width * (math.ceil(count / ranks) if stage == 3 else count),
        gathered=live_weights(width * count, count, stage, ranks),
        while_building=0 if stage == 3 else 4 * count,
        head=(4 + width) * head,
        head_left=width * head,
        layer=width * max(map(elements, model.layers), default=0),
        root=width * elements(model.units[ROOT]),
    )


def zero_state(
    zero: ZeroShares,
    config: BackendConfig,
    *,
    weights: int,
    gathered: int,
    while_building: int,
    layer: int,
    head: int = 0,
    head_left: int = 0,
    root: int = 0,
) -> TrainingState:
    """Return the memory of a model under ZeRO.

    The keyword arguments are bytes of the model itself: its weights, and the gradients of its parts in a backward pass.
    """
    on_host = config.offload_optimizer
    # Offloading moves the gradients of stages 2 and 3 to the host.
    kept = 0 if on_host and zero.stage > 1 else zero.gradients
    permanent = zero.permanent - (zero.share if on_host and zero.stage == 3 else 0)
    return TrainingState(
        weights,
        0 if on_host else zero.optimizer,
        kept,
        gathered,
        head=head,
        head_left=head_left,
        layer=zero.bucket + layer,
        root=max(zero.bucket + root, zero.bucket + zero.reduction_copies),
        micro_batch_gradients=0 if on_host else zero.micro_batch_gradients,
        step_temporaries=0 if on_host else zero.step_temporaries,
        while_building=while_building,
        permanent=permanent,
        host=zero.optimizer + zero.gradients + zero.permanent - permanent if on_host else 0,
    )
