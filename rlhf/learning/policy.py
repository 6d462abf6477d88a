"""A causal LM asked for the log-probs of responses: the actor and the reference alike."""

import torch
from torch import Tensor

from rlhf.backends.base import Model
from rlhf.batch import Batch
from rlhf.learning.log_probs import response_log_probs


class Policy:
    """`model` as a distribution over responses at the temperature of the rollouts."""

    def __init__(self, model: Model, temperature: float) -> None:
        self._model, self._temperature = model, temperature

    def log_probs(self, batch: Batch, *, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
        """Log-probs (and entropies) of the response tokens, [N, R] float32, with gradients when enabled. Collective."""
        return response_log_probs(self._model.module, batch, self._temperature, with_entropy=with_entropy)

    @torch.no_grad()
    def all_log_probs(self, batch: Batch, micro_batch_size: int) -> Tensor:
        """Log-probs of every response token of `batch`, [N, R] float32, micro-batch by micro-batch. Collective."""
        result = torch.zeros_like(batch.rollout_log_probs)
        for rows, micro in batch.micro_batches(micro_batch_size):
            log_probs, _ = self.log_probs(micro, with_entropy=False)
            result[rows, : log_probs.shape[1]] = log_probs
        return result
