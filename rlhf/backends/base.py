"""Defines the interface of training engines for learners, rollouts and checkpoints."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn

from rlhf.backends.gather import gather_tensors, split_bytes, split_over_ranks
from rlhf.models.adapter_layers import Adapters
from rlhf.models.fused_experts import FileConversions, parts_in_files
from rlhf.ranks.dims import RankGroup
from rlhf.storage.file_parts import FileParts
from rlhf.storage.shards import Shards
from rlhf.storage.state import TrainState


class Model(Protocol):
    """A model sharded over the ranks of each replica, without an optimizer, such as the reference policy."""

    module: nn.Module
    """The module to call inside `on_device`. Collective: every rank makes the same number of calls."""

    def on_device(self) -> AbstractContextManager[None]:
        """Return a context for calls of the module. Outside the context, `param_offload` keeps weights on the host."""

    def model_shards(self) -> Shards:
        """Return live views of this rank's weights and persistent buffers, valid until `on_device` begins or ends."""


class PolicyWeights(Model, Protocol):
    """The sharded weights of a policy, perhaps a frozen base with adapters. Weight syncs send them to rollout engines.

    Methods with a body are the same for all engines: they use only the shards.
    """

    _adapters: Adapters | None
    _shard_group: RankGroup
    """The ranks that shard one copy of the model."""
    _device: torch.device
    _conversions: FileConversions

    def base_shards(self) -> Shards:
        """Return live views of this rank's part of the frozen base weights, by the names in the model's files.

        Without adapters the result is empty. With adapters, `model_shards` and `optimizer_shards` contain only the
        adapters.
        """

    def base_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the gathered tensors of `base_shards` on this rank's device, in their own types. Collective."""
        return gather_tensors(self.base_shards().items(), self._shard_group, device=self._device)

    def adapter_tensors(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield the gathered adapter tensors on this rank's device, cast to `dtype` if given. Collective."""
        return gather_tensors(self.model_shards().items(), self._shard_group, dtype=dtype, device=self._device)

    def merged_tensors(self, adapters: Adapters, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        """Yield the gathered base weights with `adapters` merged in, in `dtype` or float32. Collective."""
        shards = adapters.in_order(self.base_shards(), self.model_shards())
        return adapters.merged(gather_tensors(shards, self._shard_group, device=self._device), dtype)

    def merged_shards(self) -> Shards:
        return split_over_ranks(self.full_tensors())

    def merged_bytes(self) -> int:
        return split_bytes(shard.shape for shard in self.base_shards().values())

    def hf_parts(self) -> FileParts:
        weights = self.base_shards() or self.model_shards()
        return parts_in_files({name: shard.shape for name, shard in weights.items()}, self._conversions)

    def full_tensors(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield every gathered weight and persistent buffer, inside or outside `on_device`. Collective.

        Tensors are on this rank's device. Weights are the float32 weights, cast to `dtype` if given; buffers keep their
        type. Every rank must give the same `dtype`. Tensors are valid until `on_device` begins or ends. With adapters,
        yield the merged weights by the names of the base.
        """


class TrainingBackend(PolicyWeights, TrainState, Protocol):
    """A model in training, with its optimizer and schedule."""

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of the sum of all ranks' `loss`. Collective."""

    def optimizer_step(self) -> dict[str, float]:
        """Clip the gradients, step, advance a schedule that counts optimizer steps, and clear the gradients.

        Call it inside `on_device`. Return `grad_norm` (over all ranks, before clipping) and the `lr` used. If the norm
        is not finite, only clear the gradients; the caller must check `grad_norm`.
        """

    def end_update(self) -> None:
        """Advance a schedule that counts training steps, if this training step took an optimizer step."""

    def zero_grad(self) -> None:
        """Clear the accumulated gradient."""
