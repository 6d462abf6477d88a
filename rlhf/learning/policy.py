"""Log-probs of responses under a causal LM, the actor's and the reference's alike."""

from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from rlhf.backends.base import Model
from rlhf.batch import Batch
from rlhf.learning.predicted_tokens import PredictedTokens
from rlhf.learning.spread import Spread
from rlhf.learning.walk import per_token
from rlhf.models.log_prob_head import Targets


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

        def log_probs(micro: Batch) -> Tensor:
            return self.log_probs(micro, with_entropy=False)[0]

        return per_token(batch, spread, self._budget, self._model.module, log_probs)


def response_log_probs(
    model: nn.Module, batch: Batch, temperature: float, *, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of the response tokens under `model`, and the entropies they were drawn at, [N, R] float32; zero on
    padding.

    Args:
        model: as `with_log_probs` leaves it, or an engine around it.
    """
    tokens = PredictedTokens.of(model, batch)
    targets = Targets(tokens.positions, tokens.labels, temperature, with_entropy)
    log_probs, entropy = model(**tokens.inputs, targets=targets)
    return tokens.in_rows(log_probs), None if entropy is None else tokens.in_rows(entropy)
