"""Trains the critic: the value function, its loss and its optimizer steps."""

from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor, nn

from rlhf.algorithms.aggregation import loss_sum
from rlhf.algorithms.losses import value_loss
from rlhf.backends.base import TrainingBackend
from rlhf.batch import Batch, CriticBatch
from rlhf.config import CriticConfig
from rlhf.learning.balancing import SampleBalance
from rlhf.learning.guards import Guards
from rlhf.learning.predicted_tokens import PredictedTokens, per_token
from rlhf.learning.resharding import Shuffle
from rlhf.learning.update import Counts, Metrics, MicroBatchLoss, Passes, update
from rlhf.ranks.collectives import all_sum

CONSTANT = 1e-12
"""The targets (returns) count as constant if their variance, divided by their mean square, is at most this."""


class Critic:
    """Estimates the return from each response token on, with a model that has a value head.

    Args:
        scale: the length that the loss mode `seq-mean-token-sum-norm` divides by.
        budget, forward_budget: maximum tokens of a pass with and without gradients, on one rank.
    """

    def __init__(
        self, backend: TrainingBackend, config: CriticConfig, *, scale: int, budget: int, forward_budget: int
    ) -> None:
        self.backend, self._config, self._scale, self._forward_budget = backend, config, scale, forward_budget
        self._passes = Passes(config.ppo_epochs, budget, config.loss_agg_mode)

    def on_device(self) -> AbstractContextManager[None]:
        """See `Model.on_device`. Enter it for every pass."""
        return self.backend.on_device()

    @torch.no_grad()
    def all_values(self, batch: Batch, balance: SampleBalance) -> Tensor:
        """Return the values before each token in `response_mask`, [N, R] float32; zero elsewhere. Collective."""
        model = self.backend.module
        return per_token(batch, balance, self._forward_budget, model, partial(response_values, model))

    def update(
        self, batch: CriticBatch, balance: SampleBalance, guards: Guards, shuffle: Shuffle | None = None
    ) -> Metrics:
        """Take the optimizer steps with `rlhf.learning.update.update`; return `critic/...` metrics. Collective."""
        metrics = update(self.backend, batch, balance, self._passes, self._micro_batch_loss, guards, "critic", shuffle)
        if metrics:
            metrics |= _explained_variance(batch)
        return {f"critic/{name}": value for name, value in metrics.items()}

    def _micro_batch_loss(self, micro: CriticBatch, counts: Counts) -> MicroBatchLoss:
        config, mask, returns = self._config, micro.response_mask.float(), micro.returns
        values = response_values(self.backend.module, micro)
        losses, clipped = value_loss(values, micro.values, returns, config.cliprange_value)
        loss = loss_sum(losses, mask, config.loss_agg_mode, self._scale) / counts.loss
        metrics = {"vf_clipfrac": clipped, "value_mean": values, "return_mean": returns.double()}
        means = {name: loss_sum(v.detach(), mask, "token-mean") / counts.tokens for name, v in metrics.items()}
        return MicroBatchLoss(loss, {}, means)


def _explained_variance(batch: CriticBatch) -> Metrics:
    """Return the explained variance over the tokens of all ranks; nothing without tokens. Collective."""
    # Compute in float64, because the variance is a difference of two sums.
    mask, returns = batch.response_mask, batch.returns.double()
    errors = returns - batch.values
    powers = [loss_sum(each, mask, "token-mean") for of in (returns, errors) for each in (of, of.square())]
    *sums, tokens = all_sum(torch.stack([*powers, mask.double().sum()])).tolist()
    if not tokens:
        return {}
    mean, square, error_mean, error_square = (total / tokens for total in sums)
    variance, unexplained = square - mean**2, error_square - error_mean**2
    return {"explained_variance": 1 - unexplained / variance if variance > CONSTANT * square else 0.0}


def response_values(model: nn.Module, batch: Batch) -> Tensor:
    """Return the values of `model` before each token in `response_mask`, [N, R] float32; zero elsewhere. Collective.

    The logits of `model` are [N, L, 1]. Column t comes from position prompt + t - 1, which predicts token t.
    """
    tokens = PredictedTokens.of(model, batch)
    values = model(**tokens.inputs).logits[..., 0].flatten().float()
    return tokens.in_rows(values[tokens.positions])
