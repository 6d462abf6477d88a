"""The policy update of one step: epochs, mini-batches and micro-batches over a batch, with denominators over all ranks."""

from collections.abc import Callable

import torch
from torch import Tensor

from rlhf.algorithms.aggregation import loss_count, loss_sum
from rlhf.algorithms.kl import kl_estimate
from rlhf.algorithms.losses import clipped_policy_loss
from rlhf.backends.base import FrozenPolicy, TrainingBackend
from rlhf.batch import Batch
from rlhf.config import ActorConfig
from rlhf.events import announce

Reduce = Callable[[Tensor], Tensor]


@torch.no_grad()
def compute_log_probs(policy: FrozenPolicy, batch: Batch, micro_batch_size: int) -> Tensor:
    """Log-probs of every response token of `batch`, [N, R] float32, micro-batch by micro-batch. Collective."""
    result = torch.zeros_like(batch.rollout_log_probs)
    for rows, micro in batch.micro_batches(micro_batch_size):
        log_probs, _ = policy.log_probs(micro, with_entropy=False)
        result[rows, : log_probs.shape[1]] = log_probs
    return result


def needs_old_log_probs(config: ActorConfig, train_batch_size: int) -> bool:
    """Whether the policy moves between the first and the last look at a sample; if not, the update's own pass gives the old log-probs."""
    return config.ppo_epochs > 1 or config.ppo_mini_batch_size < train_batch_size


def update_policy(
    backend: TrainingBackend, batch: Batch, config: ActorConfig, mini_batches: int, all_sum: Reduce, all_max: Reduce
) -> dict[str, float]:
    """Update the policy on `batch` and return the means over the step. Collective.

    `mini_batches` contiguous parts of equal size, one optimizer step each, `config.ppo_epochs` times over. The loss of a mini-batch is
    its aggregate over all ranks: the same number and gradient whatever the split into micro-batches and ranks (up to rounding).
    """
    device = batch.input_ids.device
    totals = torch.zeros(6, dtype=torch.float64, device=device)
    largest = torch.zeros((), device=device)
    steps: list[dict[str, float]] = []
    for _ in range(config.ppo_epochs):
        for rows in torch.arange(len(batch)).chunk(mini_batches):
            mini = batch.select(rows.to(device))
            counts = torch.stack(
                [loss_count(mini.response_mask, config.loss_agg_mode), mini.response_mask.sum()]
            ).double()
            denominator, tokens = all_sum(counts).tolist()
            for _, micro in mini.micro_batches(config.ppo_micro_batch_size_per_gpu):
                loss, sums, difference = _micro_loss(backend, micro, config, denominator, tokens)
                backend.backward(loss)
                totals += sums
                largest = torch.maximum(largest, difference)
            announce("update.mid")
            steps.append(backend.optimizer_step())
    means = (all_sum(totals) / len(steps)).tolist()
    metrics = dict(zip(("loss", "pg_loss", "kl_loss", "entropy", "clip_frac"), means[:5], strict=True))
    metrics = {f"actor/{name}": value for name, value in metrics.items()}
    if not config.use_kl_loss:
        del metrics["actor/kl_loss"]
    return metrics | {
        "actor/grad_norm": sum(s["grad_norm"] for s in steps) / len(steps),
        "actor/lr": steps[-1]["lr"],
        "rollout/logprob_diff_mean": means[5],
        "rollout/logprob_diff_max": all_max(largest).item(),
    }


def _micro_loss(
    backend: TrainingBackend, micro: Batch, config: ActorConfig, denominator: float, tokens: float
) -> tuple[Tensor, Tensor, Tensor]:
    """This micro-batch's share of the mini-batch's loss, its shares of the metrics (loss, policy loss, KL, entropy, clipped tokens,
    |trainer - rollout log-prob|), and the largest such difference."""
    assert micro.advantages is not None
    mask, mode = micro.response_mask, config.loss_agg_mode
    log_probs, entropy = backend.log_probs(micro, with_entropy=True)
    assert entropy is not None
    old = micro.old_log_probs if micro.old_log_probs is not None else log_probs.detach()
    losses, clipped = clipped_policy_loss(
        log_probs, old, micro.advantages[:, None], config.clip_ratio_low, config.clip_ratio_high
    )
    policy_loss = loss_sum(losses, mask, mode) / denominator
    loss = policy_loss
    kl_loss = torch.zeros_like(policy_loss)
    if config.use_kl_loss:
        assert micro.ref_log_probs is not None
        kl_loss = loss_sum(kl_estimate(log_probs, micro.ref_log_probs, config.kl_loss_type), mask, mode) / denominator
        loss = loss + config.kl_loss_coef * kl_loss
    if config.entropy_coeff:
        loss = loss - config.entropy_coeff * loss_sum(entropy, mask, mode) / denominator
    difference = (old - micro.rollout_log_probs).abs() * mask
    shares = [loss, policy_loss, kl_loss]
    shares += [(value.detach() * mask).sum() / tokens for value in (entropy, clipped, difference)]
    return loss, torch.stack([share.detach().double() for share in shares]), difference.max()
