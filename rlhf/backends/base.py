"""Contract of a training engine with learners, rollouts and checkpoints."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from rlhf.backends.gather import shared_out, shared_out_bytes, whole_tensors
from rlhf.models.adapter_layers import Adapters
from rlhf.models.fused_experts import parts_in_files
from rlhf.ranks.dims import RankGroup
from rlhf.storage.file_parts import FileParts
from rlhf.storage.shards import Shards
from rlhf.storage.state import TrainState


class Model(Protocol):
    """A model spread over all ranks, without an optimizer, such as the reference policy's."""

    module: nn.Module
    """The module to call, inside `on_device`; collective: every rank calls it as often."""

    def on_device(self) -> AbstractContextManager[None]:
        """A block in which the module can be called. Outside, weights that `param_offload` is set for are in the host's
        memory."""

    def model_shards(self) -> Shards:
        """Live views of this rank's weights and persistent buffers, good until `on_device` begins or ends."""


class TrainingBackend(Model, TrainState, Protocol):
    """A model in training, with its optimizer and schedule.

    What follows from shards alone is the same in every engine, and is here.
    """

    _adapters: Adapters | None
    _holders: RankGroup
    """The ranks of one copy of the model."""
    _device: torch.device
    _hf_config: PretrainedConfig

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of `loss`, the sum over all ranks of their losses, to the accumulated one. Collective."""

    def optimizer_step(self) -> dict[str, float]:
        """Clip, step, advance a schedule that goes by optimizer steps, clear gradients; inside `on_device`. Returns
        `grad_norm` (over all ranks, before clipping) and the `lr` used.

        A gradient whose norm is not finite is cleared and nothing else happens: the caller looks at `grad_norm`.
        """

    def end_update(self) -> None:
        """The training step's optimizer steps are over: a schedule that goes by training steps advances, if one of
        them was taken."""

    def zero_grad(self) -> None:
        """Forget the accumulated gradient."""

    def base_shards(self) -> Shards:
        """Live views of this rank's part of what is not trained beside adapters, by the names of the model's files;
        empty where the whole model is trained.

        With adapters `model_shards` and `optimizer_shards` are theirs alone.
        """

    def base_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors of `base_shards`, whole, on this rank's device, as they are held. Collective."""
        return whole_tensors(self.base_shards().items(), self._holders, device=self._device)

    def adapter_tensors(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """The tensors of adapters, whole, on this rank's device, in `dtype` if it is given. Collective."""
        return whole_tensors(self.model_shards().items(), self._holders, dtype=dtype, device=self._device)

    def merged_tensors(self, adapters: Adapters, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        """Base and `adapters` in one, whole, in `dtype` or float32. Collective."""
        shards = adapters.in_order(self.base_shards(), self.model_shards())
        return adapters.merged(whole_tensors(shards, self._holders, device=self._device), dtype)

    def merged_shards(self) -> Shards:
        """See `TrainState.merged_shards`."""
        return shared_out(self.full_tensors())

    def merged_bytes(self) -> int:
        """See `TrainState.merged_bytes`."""
        return shared_out_bytes(shard.shape for shard in self.base_shards().values())

    def hf_parts(self) -> FileParts:
        """See `TrainState.hf_parts`."""
        weights = self.base_shards() or self.model_shards()
        return parts_in_files({name: shard.shape for name, shard in weights.items()}, self._hf_config)

    def full_tensors(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Every weight and persistent buffer, whole, on this rank's device. Collective; `on_device` or not.

        Weights are the float32 ones, cast to `dtype` if it is given (the same on every rank); buffers are as they are.
        A tensor is good until `on_device` begins or ends. With adapters they are those of the model that base and
        adapters are together, by the base's names.
        """
