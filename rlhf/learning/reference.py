"""Provides the reference policy: the starting weights, the actor without adapters, or a moving average of the actor."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from rlhf.backends.base import Model, TrainingBackend
from rlhf.batch import Batch
from rlhf.config import RefConfig
from rlhf.events import announce
from rlhf.learning.policy import Policy
from rlhf.storage.shards import Shards


class Reference(Policy):
    """The reference policy, from which the KL terms measure the policy's distance.

    Every `ref.update_freq` steps, ref = alpha * actor + (1 - alpha) * ref in float32 (TR-DPO, arXiv 2404.09656,
    equation 4). Checkpoints save the weights of a reference that moves.

    Args:
        without_adapters: a context that disables the adapters, if `model` is the actor's model.
    """

    def __init__(
        self,
        model: Model,
        temperature: float,
        budget: int,
        config: RefConfig,
        without_adapters: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        super().__init__(model, temperature, budget)
        self._config, self._without_adapters = config, without_adapters
        self.updated_at = 0

    def log_probs(self, batch: Batch, *, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
        with self._without_adapters():
            return super().log_probs(batch, with_entropy=with_entropy)

    @property
    def moves(self) -> bool:
        """Whether the reference ever departs from the starting weights."""
        return self._config.update_freq is not None

    def shards(self) -> Shards:
        return self._model.model_shards()

    @torch.no_grad()
    def maybe_update(self, actor: TrainingBackend, step: int) -> None:
        """Move towards `actor` if `step` is a multiple of `ref.update_freq`, tensor by tensor. Collective."""
        if self._config.update_freq is None or step % self._config.update_freq:
            return
        announce("reference.update")
        with self.on_device():
            shards = self.shards()
            for name, whole in actor.full_tensors():
                shard = shards[name]
                new = shard.cut(whole)
                if new.is_floating_point():
                    shard.local.lerp_(new.to(shard.local.dtype), self._config.alpha)
                else:
                    shard.local.copy_(new)
        self.updated_at = step

    def state_dict(self) -> dict[str, Any]:
        """Return the step of the last move. The checkpointer saves the weights."""
        return {"updated_at": self.updated_at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updated_at = int(state["updated_at"])
