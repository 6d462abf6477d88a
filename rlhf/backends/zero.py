"""Accesses DeepSpeed's weights, moments and gradients at each ZeRO stage. Only this file uses DeepSpeed internals."""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf.backends.offload import Offload
from rlhf.backends.training import MOMENTS, empty_moments
from rlhf.config import TrainedFsdpConfig
from rlhf.models.skeleton import replace_parameters
from rlhf.ranks import dims
from rlhf.storage.shards import Shard


@dataclass(frozen=True)
class Range:
    """This rank's part of a parameter: the flattened elements [start, start + numel), found at `offset` of `flat`.

    `flat` is a float32 tensor that AdamW steps. It may contain parts of many parameters, and padding.
    """

    shape: tuple[int, ...]
    start: int
    numel: int
    flat: Tensor
    offset: int

    def shard(self, tensor: Tensor, *, saved_here: bool) -> Shard:
        """Return this part of `tensor`, which is `flat` or has the same layout."""
        return Shard(
            self.shape, (self.start,), tensor.detach().view(-1)[self.offset : self.offset + self.numel], saved_here
        )


class ZeroState:
    """Exposes weights, moments and step counts of a DeepSpeed engine as named shards.

    The optimizer is a `torch.optim.AdamW` with named parameters.
    """

    def __init__(self, engine: Any, optimizer: torch.optim.Optimizer, offload: TrainedFsdpConfig) -> None:
        self._engine, self._optimizer = engine, optimizer
        self._stage: int = engine.zero_optimization_stage()
        self._ranges = dict(_ranges(engine, optimizer, self._stage))
        # At stage 0 every rank has all weights, and rank 0 saves them.
        self._saved_here = self._stage > 0 or dims.everyone().rank == 0
        self._flats = {id(part.flat): part.flat for part in self._ranges.values()}
        for flat in self._flats.values():
            optimizer.state[flat] = empty_moments(flat)
        # The parameters of a flat tensor share a step count; a checkpoint has one per parameter.
        self._steps = {name: torch.zeros(()) for name in self._ranges}
        idle = offload.optimizer_offload
        self._in_passes = Offload(self._pass_tensors if offload.param_offload else None, "fsdp_config.param_offload")
        self._in_passes.guard(engine)
        self._masters = Offload(self._master_tensors if idle else None, "fsdp_config.optimizer_offload")
        self._moments = Offload(self._moment_tensors if idle else None, "fsdp_config.optimizer_offload")

    def for_passes(self) -> AbstractContextManager[None]:
        """Keep the module's weights and the gradient buffers on the device in the block."""
        return self._in_passes.on_device()

    @contextmanager
    def for_weights(self) -> Iterator[None]:
        """Keep the float32 weights on the device in the block: the module's own weights, and master weights if any."""
        with self._in_passes.on_device(), self._masters.on_device():
            yield

    @contextmanager
    def for_step(self) -> Iterator[None]:
        """Keep every tensor of an optimizer step on the device in the block."""
        with self.for_weights(), self._moments.on_device():
            yield

    def move_to_host(self) -> None:
        """Move offloaded tensors that are not in use to the host."""
        for offload in (self._in_passes, self._masters, self._moments):
            offload.move_to_host()

    def _pass_tensors(self) -> Iterator[Tensor]:
        zero = self._engine.optimizer
        if self._stage == 3:
            zero._partition_all_parameters()  # shard parameters that are still gathered
            if not zero.offload_optimizer:  # else the buffer is on the host
                yield zero.grad_partitions_flat_buffer
            yield from (bucket.buffer for bucket in zero.ipg_buckets.values() if bucket.buffer is not None)
        yield from getattr(zero, "fp32_groups_gradients_flat", ())  # of BF16_Optimizer
        yield from self._module_tensors()

    def _module_tensors(self) -> Iterator[Any]:
        for parameter in self._engine.module.parameters():
            yield parameter.ds_tensor if self._stage == 3 else parameter.detach()

    def _master_tensors(self) -> Iterator[Tensor]:
        """Return the float32 weights that do not share memory with the module's weights."""
        own = {tensor.untyped_storage()._cdata for tensor in self._module_tensors()}
        flats = (part.flat.detach() for part in self._ranges.values())
        return (flat for flat in flats if flat.untyped_storage()._cdata not in own)

    def _moment_tensors(self) -> Iterator[Tensor]:
        return (self._optimizer.state[part.flat][moment] for part in self._ranges.values() for moment in MOMENTS)

    def _current(self, tensor: Tensor) -> Tensor:
        for offload in (self._in_passes, self._masters, self._moments):
            tensor = offload.current(tensor)
        return tensor

    def module_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the module's weights, on the device or offloaded. Below stage 3 they are unsharded."""
        return ((name, self._current(weight.detach())) for name, weight in self._engine.module.named_parameters())

    def weights(self) -> Iterator[tuple[str, Shard]]:
        """Yield views of the float32 weights."""
        for name, part in self._ranges.items():
            yield name, part.shard(self._current(part.flat), saved_here=self._saved_here)

    def frozen(self) -> Iterator[tuple[str, Shard]]:
        """Yield views of the frozen weights, which have no master copy. Below stage 3 every rank has them unsharded."""
        for name, parameter in _named(self._engine, trained=False):
            if self._stage < 3:
                shape = tuple(parameter.shape)
                yield name, Shard(shape, (0,), self._current(parameter.detach()), saved_here=dims.everyone().rank == 0)
                continue
            start, size = _part_of(parameter, parameter.ds_tensor.numel())
            yield name, Shard(tuple(parameter.ds_shape), (start,), self._current(parameter.ds_tensor.detach())[:size])

    def moments(self) -> Iterator[tuple[str, Shard]]:
        """Yield views of the moments, and the step counts."""
        for name, part in self._ranges.items():
            yield f"{name}.step", Shard((), (0,), self._steps[name], saved_here=dims.everyone().rank == 0)
            for moment in MOMENTS:
                flat = self._current(self._optimizer.state[part.flat][moment])
                yield f"{name}.{moment}", part.shard(flat, saved_here=self._saved_here)

    def read_step_counts(self) -> None:
        """Copy the optimizer's step counts, one per flat tensor, to the counts per parameter."""
        # Read each count once per flat tensor, because a read may wait for the GPU.
        counts = {key: float(self._optimizer.state[flat]["step"]) for key, flat in self._flats.items()}
        for name, part in self._ranges.items():
            self._steps[name].fill_(counts[id(part.flat)])

    @torch.no_grad()
    def refresh(self) -> None:
        """Recompute the module's weights and AdamW's step counts from the float32 weights and `_steps`. Collective."""
        counts: dict[int, float] = {}
        for name, part in self._ranges.items():
            # In a checkpoint of FSDP2, a parameter that never had a gradient has step count 0. Its moments are zero, so
            # any count is right.
            counts[id(part.flat)] = max(counts.get(id(part.flat), 0.0), float(self._steps[name]))
            self._optimizer.state[part.flat]["step"].fill_(counts[id(part.flat)])
        self.read_step_counts()
        zero = self._engine.optimizer
        if self._stage == 0:
            for name, parameter in _named(self._engine, trained=True):
                parameter.copy_(self._ranges[name].flat)
        elif self._stage < 3:
            zero.update_lp_params()
        else:
            zero._partition_all_parameters()
            for group in range(len(zero.fp32_partitioned_groups_flat)):
                zero._reassign_or_swap_out_partitioned_parameters(group)
            if zero.persistent_parameters:
                zero.persistent_parameters[0].all_gather(zero.persistent_parameters)

    def clear_gradients(self) -> None:
        """Clear the gradients accumulated since the last step."""
        zero = self._engine.optimizer
        zero.zero_grad()
        if self._stage == 3:
            zero.grad_partitions_flat_buffer.zero_()
            zero._offload_boundary_param_ids.clear()
        elif hasattr(zero, "averaged_gradients"):  # not BF16_Optimizer, which is ZeRO 1 in bfloat16
            for group in range(len(zero.bit16_groups)):
                zero.averaged_gradients[group] = zero.all_grad_tensors[group] = None
            zero.micro_step_id = -1
            if zero.cpu_offload:
                zero._offload_accumulated_param_ids.clear()
                zero.reset_cpu_buffers()


def partition(model: PreTrainedModel, init: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Shard the parameters for ZeRO 3 in turn, so that `device` never has two unsharded parameters. Collective.

    Parameters on the meta device get memory but no values. `init` is a `deepspeed.zero.Init`. DeepSpeed's engine would
    shard the model too, but would first move the whole model to `device`.
    """

    def parted(_: str, parameter: nn.Parameter) -> nn.Parameter:
        whole = torch.empty_like(parameter, device=device, dtype=dtype) if parameter.is_meta else parameter.data
        result = nn.Parameter(whole.to(device, dtype), parameter.requires_grad)
        init._convert_to_zero_parameters([result])
        return result

    replace_parameters(model, parted)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)


def _ranges(engine: Any, optimizer: torch.optim.Optimizer, stage: int) -> Iterator[tuple[str, Range]]:
    zero, named = engine.optimizer, _named(engine, trained=True)
    flats = dict(_tensors_of_adamw(optimizer, stage)) if stage < 3 else {}
    if stage == 0:  # the parameters themselves, or their float32 copies
        for name, parameter in named:
            yield name, Range(tuple(parameter.shape), 0, parameter.numel(), flats[name], 0)
    elif stage < 3:  # one tensor of all parameters of a group, split into equal parts
        for name, parameter in named:
            shape, mapping, flat = tuple(parameter.shape), parameter._hp_mapping, flats[name]
            if mapping is None:
                yield name, Range(shape, 0, 0, flat, 0)
            else:
                part, at = mapping.lp_fragment_address, mapping.hp_fragment_address
                yield name, Range(shape, part.start, part.numel, flat, at.start)
    else:  # every parameter split into equal parts, the last parts padded or empty
        for name, parameter in named:
            group, offset, numel = zero.grad_position[parameter.ds_id]
            start, size = _part_of(parameter, numel)
            yield name, Range(tuple(parameter.ds_shape), start, size, zero.fp32_partitioned_groups_flat[group], offset)


def _named(engine: Any, *, trained: bool) -> Iterator[tuple[str, Any]]:
    return ((name, p) for name, p in engine.module.named_parameters() if p.requires_grad == trained)


def _part_of(parameter: Any, numel: int) -> tuple[int, int]:
    """Return the start and size of this rank's part of a parameter.

    Parts have `numel` elements, the last ones fewer or none.
    """
    size = math.prod(parameter.ds_shape)
    start = min(dims.data().rank * numel, size)
    return start, min(numel, size - start)


def _tensors_of_adamw(optimizer: torch.optim.Optimizer, stage: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensor that AdamW steps for each parameter: its own at stage 0, its group's at stages 1 and 2."""
    for group in optimizer.param_groups:
        names, tensors = group["param_names"], group["params"]
        yield from zip(names, tensors if stage == 0 else tensors * len(names), strict=True)
