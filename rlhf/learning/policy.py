"""Log-probs of responses under a causal LM, the actor's and the reference's alike."""

from contextlib import AbstractContextManager

import torch
from torch import Tensor

from rlhf.backends.base import Model
from rlhf.batch import Batch
from rlhf.learning.log_probs import response_log_probs
from rlhf.learning.spread import Spread
from rlhf.learning.walk import walk
from rlhf.models.packing import is_packed


class Policy:
    """Distribution of `model` over responses.

    Args:
        temperature: of the rollouts.
        budget: tokens of a forward pass on one rank, where no gradients are wanted.
    """

    def __init__(self, model: Model, temperature: float, budget: int) -> None:
        self._model, self._temperature, self._budget = model, temperature, budget

    def on_device(self) -> AbstractContextManager[None]:
        """See `Model.on_device`; it must be entered for every pass."""
        return self._model.on_device()

    def log_probs(self, batch: Batch, *, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
        """Log-probs (and entropies) of the response tokens, [N, R] float32, with gradients when enabled. Collective."""
        return response_log_probs(self._model.module, batch, self._temperature, with_entropy=with_entropy)

    @torch.no_grad()
    def all_log_probs(self, batch: Batch, spread: Spread) -> Tensor:
        """Log-probs of every response token of `batch`, [N, R] float32, micro-batch by micro-batch. Collective.

        Args:
            spread: of the step, of which `batch` is this rank's part.
        """
        result = torch.zeros_like(batch.rollout_log_probs)
        for rows, micro in walk(batch, spread, self._budget, padded=not is_packed(self._model.module)):
            log_probs, _ = self.log_probs(micro, with_entropy=False)
            result[rows, : log_probs.shape[1]] = log_probs
        return result
