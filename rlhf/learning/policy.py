"""Computes log-probs of responses under a causal LM, for the actor and the reference."""

from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from rlhf.backends.base import Model
from rlhf.batch import Batch
from rlhf.learning.balancing import SampleBalance
from rlhf.learning.predicted_tokens import PredictedTokens, per_token
from rlhf.models.log_prob_head import Targets


class Policy:
    """Computes log-probs of responses under `model`.

    Args:
        temperature: sampling temperature of the rollouts.
        budget: maximum tokens of a forward pass without gradients on one rank.
    """

    def __init__(self, model: Model, temperature: float, budget: int) -> None:
        self._model, self._temperature, self._budget = model, temperature, budget

    def on_device(self) -> AbstractContextManager[None]:
        """See `Model.on_device`. Enter it for every pass."""
        return self._model.on_device()

    def log_probs(self, batch: Batch, *, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
        """Return log-probs and, with `with_entropy`, entropies of the response tokens. See `response_log_probs`."""
        return response_log_probs(self._model.module, batch, self._temperature, with_entropy=with_entropy)

    @torch.no_grad()
    def all_log_probs(self, batch: Batch, balance: SampleBalance) -> Tensor:
        """Return log-probs of all response tokens of `batch`, [N, R] float32, without gradients. Collective."""
        model = self._model.module
        return per_token(batch, balance, self._budget, model, lambda m: self.log_probs(m, with_entropy=False)[0])


def response_log_probs(
    model: nn.Module, batch: Batch, temperature: float, *, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Return log-probs of the response tokens, and entropies if `with_entropy`, [N, R] float32 each. Collective.

    Both are zero outside `response_mask`, and have gradients if autograd is enabled. With `sampling_mask`, both are of
    the policy renormalized over the kept tokens. `model` is a model from `with_log_probs`, or a training engine around
    one.
    """
    tokens = PredictedTokens.of(model, batch)
    kept = None if batch.sampling_mask is None else batch.sampling_mask[tokens.places]
    targets = Targets(tokens.positions, tokens.labels, temperature, with_entropy, kept)
    log_probs, entropy = model(**tokens.inputs, targets=targets)
    return tokens.in_rows(log_probs), None if entropy is None else tokens.in_rows(entropy)
