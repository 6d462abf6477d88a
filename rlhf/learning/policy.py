"""Log-probs of responses under a causal LM, the actor's and the reference's alike."""

import torch
from torch import Tensor

from rlhf.backends.base import Model
from rlhf.batch import Batch
from rlhf.learning.log_probs import response_log_probs


class Policy:
    """Distribution of `model` over responses.

    Args:
        temperature: of the rollouts.
        micro_batch_size: samples per forward pass on one rank, where no gradients are wanted.
    """

    def __init__(self, model: Model, temperature: float, micro_batch_size: int) -> None:
        self._model, self._temperature, self._micro_batch_size = model, temperature, micro_batch_size

    def log_probs(self, batch: Batch, *, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
        """Log-probs (and entropies) of the response tokens, [N, R] float32, with gradients when enabled. Collective."""
        return response_log_probs(self._model.module, batch, self._temperature, with_entropy=with_entropy)

    @torch.no_grad()
    def all_log_probs(self, batch: Batch) -> Tensor:
        """Log-probs of every response token of `batch`, [N, R] float32, micro-batch by micro-batch. Collective."""
        result = torch.zeros_like(batch.rollout_log_probs)
        for rows, micro in batch.micro_batches(self._micro_batch_size):
            log_probs, _ = self.log_probs(micro, with_entropy=False)
            result[rows, : log_probs.shape[1]] = log_probs
        return result
