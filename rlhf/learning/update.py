"""Takes the optimizer steps on one batch: epochs, mini-batches, micro-batches, denominators over all ranks, guards."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, count
from typing import TypeVar

import torch
from torch import Tensor

from rlhf.algorithms.aggregation import loss_count
from rlhf.backends.base import TrainingBackend
from rlhf.batch import Batch
from rlhf.events import announce, report
from rlhf.learning.balancing import SampleBalance
from rlhf.learning.guards import Guards
from rlhf.learning.resharding import Shuffle
from rlhf.models.packing import is_packed
from rlhf.ranks import dims
from rlhf.ranks.collectives import all_max, all_sum

Metrics = dict[str, float]
LARGEST = "rollout/logprob_diff_max"
"""The only metric of an update that is a maximum, not a mean."""
B = TypeVar("B", bound=Batch)


@dataclass(frozen=True)
class Counts:
    """Denominators of a mini-batch over all ranks.

    loss: for the loss.
    tokens: for means over response tokens.
    counted: for means over the tokens that the loss counts.
    """

    loss: float
    tokens: float
    counted: float


@dataclass(frozen=True)
class MicroBatchLoss:
    """Contribution of a micro-batch to the loss and metrics of its mini-batch."""

    loss: Tensor
    """Has gradients."""
    terms: dict[str, Tensor]
    """Terms of the loss, summed over micro-batches and ranks."""
    means: dict[str, Tensor]
    """Contributions to means over response tokens, summed over micro-batches and ranks."""
    largest: Tensor | None = None
    """Contribution to the metric `LARGEST`, the maximum over micro-batches, ranks and optimizer steps."""


@dataclass(frozen=True)
class Passes:
    """Passes of an update over a batch: `epochs` times, in micro-batches of at most `budget` tokens.

    Each mini-batch of an epoch is one optimizer step.
    """

    epochs: int
    budget: int
    loss_agg_mode: str


def update(
    backend: TrainingBackend,
    batch: B,
    balance: SampleBalance,
    passes: Passes,
    micro_batch_loss: Callable[[B, Counts], MicroBatchLoss],
    guards: Guards,
    who: str,
    shuffle: Shuffle | None = None,
    before: Callable[[B, list[list[int]]], B] | None = None,
    after: Callable[[Metrics], Metrics] | None = None,
) -> Metrics:
    """Take the optimizer steps of a training step, and return their metrics. Collective.

    A metric is the mean over the mini-batches that have it; `lr` is the last value, and `LARGEST` the maximum. If the
    batch is already rejected, do nothing and return {}.

    The loss of a mini-batch is aggregated over all ranks, so the split into micro-batches and ranks changes neither
    loss nor gradient (up to rounding). If the loss counts no token, the optimizer steps with a gradient of 0, as in
    verl and TRL: weights decay, and the schedule counts the step. Such mini-batches (a fraction `empty_mini_batches`)
    lack the loss's metrics; without response tokens, they have only `grad_norm` and `lr`. `guards` may end the update.

    Args:
        batch: this rank's samples.
        balance: the split of all ranks' samples over mini-batches.
        micro_batch_loss: computes loss and metrics of a micro-batch, divided by the denominators of its mini-batch.
        who: `actor` or `critic`.
        shuffle: draws new mini-batches for each later epoch; None reuses the first epoch's mini-batches.
        before: receives the batch and the next mini-batch's rows, by micro-batch; returns the batch to train on.
        after: receives the metrics of an optimizer step and returns further metrics. Not called if no rank had a token.
    """
    if guards.rejected is not None:
        return {}
    padded = not is_packed(backend.module)
    plans = [mini_batch_plans(balance, passes.budget, padded=padded)] * passes.epochs
    if shuffle is not None:
        dealt = (shuffle.deal(epoch)[1] for epoch in range(1, passes.epochs))
        plans[1:] = [mini_batch_plans(each, passes.budget, padded=padded) for each in dealt]
    steps: list[Metrics] = []
    done, micros = count(1), sum(len(plan) for of_epoch in plans for plan in of_epoch)

    def report_progress() -> None:
        report(f"{who} update", next(done), micros)

    for epoch, of_epoch in enumerate(plans):
        present = batch if shuffle is None or epoch == 0 else shuffle.moved(batch, epoch)
        for plan in of_epoch:
            chosen = present if before is None else before(present, plan)
            metrics, tokens = _accumulate(backend, chosen, plan, passes, micro_batch_loss, report_progress)
            steps.append(metrics)
            announce("update.mid")
            if not guards.allows(who, **{name: metrics[name] for name in ("loss", "kl", "ref_kl") if name in metrics}):
                backend.zero_grad()
                return _finish(backend, steps)
            metrics |= backend.optimizer_step()
            if not guards.allows(who, grad_norm=metrics["grad_norm"]):
                return _finish(backend, steps)
            if after is not None and tokens:
                metrics |= after(metrics)
    return _finish(backend, steps)


def mini_batch_plans(balance: SampleBalance, budget: int, *, padded: bool) -> list[list[list[int]]]:
    """Return this rank's rows by [mini-batch][micro-batch].

    Every rank has the same number of micro-batches, of at most `budget` tokens each unless one sample has more.
    """
    rank = dims.data().rank
    return [
        balance.micro_batches(budget, padded=padded, mini_batch=mini_batch)[rank]
        for mini_batch in range(balance.mini_batches)
    ]


def _finish(backend: TrainingBackend, steps: list[Metrics]) -> Metrics:
    """Call the backend's `end_update`, because LR schedules may count updates. Return the metrics of all steps."""
    backend.end_update()
    return _means(steps)


def _accumulate(
    backend: TrainingBackend,
    batch: B,
    plan: list[list[int]],
    passes: Passes,
    micro_batch_loss: Callable[[B, Counts], MicroBatchLoss],
    report_progress: Callable[[], None],
) -> tuple[Metrics, int]:
    """Accumulate the gradient of one mini-batch. Return its metrics and its response tokens, both over all ranks."""
    own_rows = torch.tensor(list(chain.from_iterable(plan)), dtype=torch.int64)
    own_rows = own_rows.to(batch.input_ids.device, non_blocking=True)
    own_counted, own_mask = batch.counted[own_rows], batch.response_mask[own_rows]
    own_counts = [loss_count(own_counted, passes.loss_agg_mode), own_mask.sum(), own_counted.sum()]
    counted, tokens, counted_tokens = all_sum(torch.stack(own_counts).double()).tolist()
    counts = Counts(max(counted, 1.0), max(tokens, 1.0), max(counted_tokens, 1.0))
    terms: dict[str, Tensor] = {}
    means: dict[str, Tensor] = {}
    largest: list[Tensor] = []
    for rows in plan:
        part = micro_batch_loss(batch.micro_batch(rows), counts)
        backend.backward(part.loss)
        report_progress()
        for sums, shares_of in ((terms, {"loss": part.loss} | part.terms), (means, part.means)):
            for name, value in shares_of.items():
                sums[name] = sums.get(name, 0.0) + value.detach().double()
        if part.largest is not None:
            largest.append(part.largest)
    every = terms | means
    metrics = dict(zip(every, all_sum(torch.stack(list(every.values()))).tolist(), strict=True))
    if largest:
        metrics[LARGEST] = all_max(torch.stack(largest).max()).item()
    if not tokens:
        metrics = {}
    elif not counted:
        metrics = {name: value for name, value in metrics.items() if name not in terms}
    return metrics | {"empty_mini_batches": float(counted == 0)}, int(tokens)


def _means(steps: list[Metrics]) -> Metrics:
    means = {}
    for name in {name: None for step in steps for name in step}:
        values = [step[name] for step in steps if name in step]
        if name == LARGEST:
            means[name] = max(values)
        else:
            means[name] = values[-1] if name == "lr" else sum(values) / len(values)
    return means
