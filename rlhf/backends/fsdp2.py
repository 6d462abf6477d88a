"""Trains with FSDP2: shards parameters, gradients and optimizer state by rows, on CPU (gloo) and CUDA (NCCL)."""

import logging
import math
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as Cut
from transformers import PreTrainedModel

from rlhf.backends.base import PolicyWeights, TrainingBackend
from rlhf.backends.gather import gather_tensors
from rlhf.backends.gradient_sums import sum_gradients
from rlhf.backends.offload import Offload
from rlhf.backends.training import MOMENTS, Scheduled, Training, adamw_options, empty_moments, parameter_groups
from rlhf.config import BackendConfig
from rlhf.models.adapter_layers import Adapters
from rlhf.models.fused_experts import FileConversions
from rlhf.models.log_prob_head import with_log_probs
from rlhf.models.skeleton import materialise, persistent_buffers
from rlhf.ranks import dims
from rlhf.storage.boxes import Box
from rlhf.storage.shards import Shard, Shards

# A head with a bias returns a view. The warning is about in-place changes of outputs, which this trainer never makes.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


log = logging.getLogger(__name__)
_PLAIN = "One rank: the model trains without FSDP2. Results and checkpoints have the same bits as with FSDP2."
_REPLICAS = "Each rank trains a whole replica of the model without FSDP2, and sums gradients once per optimizer step."


class Fsdp2Model:
    """Shards a model's weights over the ranks of each replica (`backend.dp_replicate`).

    `moves`: whether weights without gradients change, as in a moving reference.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: BackendConfig,
        device: torch.device,
        *,
        param_offload: bool = False,
        moves: bool = False,
    ) -> None:
        self.module: nn.Module = shard(with_log_probs(model, use_liger=config.use_liger), config, device)
        self._shard_group = dims.model(device, config.replicas)
        self._device = device
        find = self._local_weights if param_offload else None
        frozen = tuple if moves else self._frozen_weights
        self._weights = Offload(find, "fsdp_config.param_offload", frozen)
        self._weights.guard(self.module)
        self._weights.move_to_host()

    def on_device(self) -> AbstractContextManager[None]:
        """See `Model.on_device`."""
        return self._weights.on_device()

    def _local_weights(self) -> Iterator[Tensor]:
        self.reshard()
        return map(local_part, self.module.parameters())

    def _frozen_weights(self) -> Iterator[Tensor]:
        return (local_part(weight) for weight in self.module.parameters() if not weight.requires_grad)

    def reshard(self) -> None:
        """Replace gathered weights by their shards.

        With `reshard_after_forward=false`, a forward pass without a backward pass leaves gathered weights in the
        module. FSDP2 would discard writes to the gathered weights, and reads would not return shards.
        """
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield sharded parameters (tied parameters once) and persistent buffers by name, in a fixed order."""
        self.reshard()
        yield from self.module.named_parameters()
        yield from persistent_buffers(self.module)

    def full_tensors(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """See `TrainingBackend.full_tensors`."""
        self.reshard()
        weights = self._weights.shards(shards_of(self.module.named_parameters()))
        yield from gather_tensors(weights.items(), self._shard_group, dtype=dtype, device=self._device)
        yield from ((name, buffer.detach()) for name, buffer in persistent_buffers(self.module))

    def model_shards(self) -> Shards:
        """See `TrainState.model_shards`."""
        return self._weights.shards(shards_of(self.named_state()))


class Fsdp2Policy(Fsdp2Model, PolicyWeights):
    """Shards a policy, perhaps with adapters. `Fsdp2Backend` trains the policy; an evaluation only reads it."""

    def __init__(
        self, model: PreTrainedModel, config: BackendConfig, device: torch.device, *, param_offload: bool = False
    ) -> None:
        self._conversions = FileConversions.of(model)
        super().__init__(model, config, device, param_offload=param_offload)
        self._adapters = Adapters.of(self.module)

    def model_shards(self) -> Shards:
        state = self.named_state()
        return self._weights.shards(shards_of(state if self._adapters is None else self._adapters.trained(state)))

    def base_shards(self) -> Shards:
        if self._adapters is None:
            return {}
        return self._weights.shards(shards_of(self._adapters.base(self.named_state())))

    def full_tensors(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        if self._adapters is None:
            yield from super().full_tensors(dtype)
            return
        yield from self.merged_tensors(self._adapters, dtype)

    def after_load(self) -> None:
        """Do nothing: a load writes to the module's own tensors."""


class Fsdp2Backend(Fsdp2Policy, Scheduled, TrainingBackend):
    """Trains a model with AdamW in float32 and a learning-rate schedule. Frozen parameters have no optimizer state."""

    def __init__(self, model: PreTrainedModel, config: BackendConfig, device: torch.device, training: Training) -> None:
        optim, offload = training.optim, training.offload
        self._is_plain, ranks = stays_plain(model, config), dims.data()
        if self._is_plain and ranks.rank == 0:
            log.info("%s", _PLAIN if ranks.size == 1 else _REPLICAS)
        Fsdp2Policy.__init__(self, model, config, device, param_offload=offload.param_offload)
        # Train mode does not slow down log-prob passes: passes without gradients recompute no activations. Dropout is
        # off (models/loading.py).
        self.module.train()
        optimizer = torch.optim.AdamW(parameter_groups(self.module, optim), **adamw_options(optim))
        Scheduled.__init__(self, optimizer, training)
        self._grad_clip = training.grad_clip
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                optimizer.state[parameter] = empty_moments(parameter)
        self._moments = Offload(
            self._local_moments if offload.optimizer_offload else None, "fsdp_config.optimizer_offload"
        )
        self._moments.move_to_host()

    def _local_moments(self) -> Iterator[Tensor]:
        return (local_part(state[moment]) for state in self.optimizer.state.values() for moment in MOMENTS)

    def backward(self, loss: Tensor) -> None:
        """Scale the loss by the number of ranks: FSDP2 averages over ranks, but the interface requires a sum.

        Do not scale for whole replicas, which sum their gradients in the optimizer step.
        """
        (loss if self._is_plain else loss * dims.data().size).backward()

    def optimizer_step(self) -> dict[str, float]:
        if self._is_plain and dims.data().size > 1:
            sum_gradients(self.module.parameters())
        found = nn.utils.clip_grad_norm_(self.module.parameters(), self._grad_clip)
        norm = float(found.full_tensor() if isinstance(found, DTensor) else found)
        lr = self.scheduler.get_last_lr()[0]
        # If the norm is not finite, clipping has made the gradients NaN or 0, and a step would damage the weights.
        if math.isfinite(norm):
            with self._moments.on_device():
                self.optimizer.step()
            self.count_optimizer_step()
        self.zero_grad()
        return {"grad_norm": norm, "lr": float(lr)}

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def optimizer_shards(self) -> Shards:
        self.reshard()
        named = self.module.named_parameters()
        moments = shards_of(
            (f"{name}.{key}", value)
            for name, parameter in (named if self._adapters is None else self._adapters.trained(named))
            for key, value in self.optimizer.state[parameter].items()
        )
        return self._moments.shards(moments)


def shard(model: PreTrainedModel, config: BackendConfig, device: torch.device) -> PreTrainedModel:
    """Apply FSDP2 to every decoder layer, to an untied head and to the other weights, and move the model to `device`.

    Tensors on the meta device become uninitialised shards. A model that `stays_plain` is only moved.
    """
    if stays_plain(model, config):
        materialise(model, device)
    else:
        _apply_fsdp2(model, config, device)
    model._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))
    return model


def _apply_fsdp2(model: PreTrainedModel, config: BackendConfig, device: torch.device) -> None:
    options: dict[str, Any] = {
        "mesh": dims.mesh(device, config.replicas),
        "mp_policy": precision_of(model, config),
        "reshard_after_forward": config.reshard_after_forward,
    }
    for layer in list(layers_of(model)):
        fully_shard(layer, **options)
    head = model.get_output_embeddings()
    if head is not None and head.weight is not model.get_input_embeddings().weight:
        fully_shard(head, **options)
    fully_shard(model, **options)


def stays_plain(model: PreTrainedModel, config: BackendConfig) -> bool:
    """Return whether each rank keeps a whole replica without FSDP2.

    True if there are as many replicas as ranks, and passes compute in the dtype of the weights. FSDP2 would copy every
    weight and gradient in each pass, and would reduce the gradients of each micro-batch. On one rank the bits are the
    same with and without FSDP2.
    """
    return dims.everyone().size == config.replicas and precision_of(model, config).param_dtype is None


def precision_of(model: PreTrainedModel, config: BackendConfig) -> MixedPrecisionPolicy:
    """Return the types in which FSDP2 computes and reduces; `param_dtype` is None if weights are not cast."""
    if config.autocast == "bfloat16":
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if any(parameter.dtype == torch.bfloat16 for parameter in model.parameters()):
        return MixedPrecisionPolicy(param_dtype=torch.float32)  # stored in bfloat16, computed in float32
    return MixedPrecisionPolicy()


def layers_of(model: PreTrainedModel) -> Iterator[nn.Module]:
    """Yield the modules in transformers' `_no_split_modules`; of nested modules (Mamba) only the outermost."""
    kinds, outer = set(model._no_split_modules or ()), ""
    for name, module in model.named_modules():
        if type(module).__name__ in kinds and not (outer and name.startswith(f"{outer}.")):
            outer = name
            yield module


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor, or the whole tensor if it is not sharded."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def shards_of(tensors: Iterable[tuple[str, Tensor]]) -> Shards:
    """Return this rank's part of each tensor.

    Only one replica saves a replicated tensor: the first replica if the tensor has a single element, such as a step
    count. The replicas divide all other tensors about equally.
    """
    shards: dict[str, Shard] = {}
    saved: dict[int, list[int]] = {}
    for name, tensor in tensors:
        replica, replicas = replica_of(tensor)
        by_replica = saved.setdefault(replicas, [0] * replicas)
        saver = by_replica.index(min(by_replica)) if tensor.numel() > 1 else 0
        by_replica[saver] += tensor.numel()
        offsets = offsets_of(tensor) if isinstance(tensor, DTensor) else (0,)
        shards[name] = Shard(tuple(tensor.shape), offsets, local_part(tensor), saver == replica)
    return shards


def replica_of(tensor: Tensor) -> tuple[int, int]:
    """Return the index of this rank's replica of `tensor`, and the number of replicas.

    An unsharded tensor has a replica on every rank.
    """
    if not isinstance(tensor, DTensor):
        return dims.everyone().rank, dims.everyone().size
    replica, replicas = 0, 1
    for dimension, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            size = tensor.device_mesh.size(dimension)
            replica, replicas = replica * size + tensor.device_mesh.get_local_rank(dimension), replicas * size
    return replica, replicas


def offsets_of(tensor: DTensor) -> tuple[int, ...]:
    """Return the offset of this rank's part of a sharded tensor in each dimension."""
    box, mesh = Box((0,) * tensor.ndim, tuple(tensor.shape)), tensor.device_mesh
    for dimension, placement in enumerate(tensor.placements):
        if isinstance(placement, Cut):
            box = chunk_of(box, placement.dim, mesh.get_local_rank(dimension), mesh.size(dimension))
    assert box.sizes == tensor.to_local().shape, f"{tensor.placements} do not split a tensor as torch.chunk does"
    return box.offsets


def chunk_of(box: Box, dim: int, rank: int, ranks: int) -> Box:
    """Return the part of `rank` in a box that is sharded along `dim` over `ranks`, split like torch.chunk.

    Parts are equal, except that the last parts may be smaller or empty.
    """
    start, stop = (min(number * math.ceil(box.sizes[dim] / ranks), box.sizes[dim]) for number in (rank, rank + 1))
    offsets = (*box.offsets[:dim], box.offsets[dim] + start, *box.offsets[dim + 1 :])
    return Box(offsets, (*box.sizes[:dim], stop - start, *box.sizes[dim + 1 :]))
