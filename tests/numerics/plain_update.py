"""The policy update as one would write it on a blackboard: one process, one sequence at a time, no padding, float64."""

import copy
import math
from collections import defaultdict

import torch
from torch import Tensor, nn

from rlhf.batch import Batch
from rlhf.config import ActorConfig


def plain_update(
    model: nn.Module, reference: nn.Module, batch: Batch, config: ActorConfig, mini_batches: int, total_steps: int
) -> tuple[dict[str, Tensor], list[dict[str, Tensor]], dict[str, float]]:
    """The weights after the update of `model` (left as it is), the gradient of every optimizer step, and the metrics."""
    policy, reference = copy.deepcopy(model).double(), copy.deepcopy(reference).double()
    parameters = dict(policy.named_parameters())
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in parameters.items()}
    samples = range(len(batch))
    with torch.no_grad():
        old = [log_softmax_of(policy, batch, s)[0] for s in samples]
        ref = [log_softmax_of(reference, batch, s)[0] for s in samples]
    gradients: list[dict[str, Tensor]] = []
    metrics: defaultdict[str, float] = defaultdict(float)
    size = len(batch) // mini_batches
    for _ in range(config.ppo_epochs):
        for start in range(0, len(batch), size):
            mini = samples[start : start + size]
            loss = mini_batch_loss(policy, batch, mini, old, ref, config, metrics)
            policy.zero_grad()
            loss.backward()
            gradients.append({name: p.grad.clone() for name, p in parameters.items()})
            metrics["actor/lr"] = learning_rate(config, len(gradients) - 1, total_steps)
            metrics["actor/grad_norm"] += adamw_step(parameters, moments, config, len(gradients), metrics["actor/lr"])
    for name in metrics.keys() - {"actor/lr", "rollout/logprob_diff_max"}:
        metrics[name] /= len(gradients)
    return {name: p.detach() for name, p in parameters.items()}, gradients, dict(metrics)


def log_softmax_of(model: nn.Module, batch: Batch, sample: int) -> tuple[Tensor, Tensor]:
    """Log-probs of the response tokens of one sample, and the entropies, at temperature 1."""
    prompt, response = int(batch.prompt_lengths[sample]), int(batch.response_lengths[sample])
    ids = batch.input_ids[sample, : prompt + response]
    every = torch.log_softmax(model(input_ids=ids[None], use_cache=False).logits[0].double(), dim=-1)
    every = every[prompt - 1 : prompt + response - 1]
    return torch.stack([every[i, ids[prompt + i]] for i in range(response)]), -(every.exp() * every).sum(dim=-1)


def mini_batch_loss(
    policy: nn.Module,
    batch: Batch,
    mini: range,
    old: list[Tensor],
    ref: list[Tensor],
    config: ActorConfig,
    metrics: dict[str, float],
) -> Tensor:
    """The loss of one mini-batch; its figures are added to `metrics`."""
    losses: dict[str, list[list[Tensor]]] = {"pg": [], "kl": [], "entropy": []}
    clipped, differences = [], []
    for sample in mini:
        log_probs, entropies = log_softmax_of(policy, batch, sample)
        for values in losses.values():
            values.append([])
        for token, log_prob in enumerate(log_probs):
            advantage = batch.advantages[sample].double()
            ratio = torch.exp(log_prob - old[sample][token])
            bounded = ratio.clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
            losses["pg"][-1].append(torch.max(-advantage * ratio, -advantage * bounded))
            clipped.append(float(-advantage * bounded > -advantage * ratio))
            losses["kl"][-1].append(kl(log_prob - ref[sample][token], config.kl_loss_type))
            losses["entropy"][-1].append(entropies[token])
            differences.append(abs(float(old[sample][token]) - float(batch.rollout_log_probs[sample, token])))
    totals = {name: aggregate(values, config.loss_agg_mode) for name, values in losses.items()}
    loss = totals["pg"] - config.entropy_coeff * totals["entropy"]
    if config.use_kl_loss:
        loss = loss + config.kl_loss_coef * totals["kl"]
        metrics["actor/kl_loss"] += float(totals["kl"].detach())
    metrics["actor/loss"] += float(loss.detach())
    metrics["actor/pg_loss"] += float(totals["pg"].detach())
    metrics["actor/entropy"] += float(aggregate(losses["entropy"], "token-mean").detach())
    metrics["actor/clip_frac"] += sum(clipped) / len(clipped)
    metrics["rollout/logprob_diff_mean"] += sum(differences) / len(differences)
    metrics["rollout/logprob_diff_max"] = max(metrics["rollout/logprob_diff_max"], *differences)
    return loss


def kl(difference: Tensor, kind: str) -> Tensor:
    return {"k1": difference, "k2": difference**2 / 2, "k3": torch.exp(-difference) - 1 + difference}[kind]


def aggregate(rows: list[list[Tensor]], mode: str) -> Tensor:
    if mode == "token-mean":
        return torch.stack([value for row in rows for value in row]).mean()
    of_rows = [torch.stack(row).sum() / (len(row) if mode == "seq-mean-token-mean" else 1) for row in rows]
    return torch.stack(of_rows).mean()


def learning_rate(config: ActorConfig, step: int, total_steps: int) -> float:
    """The cosine schedule with warm-up; the only shape used here."""
    optim = config.optim
    if step < optim.lr_warmup_steps:
        return optim.lr * (step + 1) / optim.lr_warmup_steps
    progress = (step - optim.lr_warmup_steps) / (total_steps - optim.lr_warmup_steps)
    floor = optim.min_lr_ratio
    return optim.lr * (floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2)


def adamw_step(
    parameters: dict[str, nn.Parameter],
    moments: dict[str, tuple[Tensor, Tensor]],
    config: ActorConfig,
    step: int,
    lr: float,
) -> float:
    """Clip and step (Loshchilov and Hutter, arXiv 1711.05101, algorithm 2); returns the norm before clipping."""
    (beta1, beta2), optim = config.optim.betas, config.optim
    norm = math.sqrt(sum(float((p.grad**2).sum()) for p in parameters.values()))
    scale = min(1.0, config.grad_clip / norm)
    with torch.no_grad():
        for name, p in parameters.items():
            first, second = moments[name]
            gradient = p.grad * scale
            first.copy_(beta1 * first + (1 - beta1) * gradient)
            second.copy_(beta2 * second + (1 - beta2) * gradient**2)
            direction = (first / (1 - beta1**step)) / (torch.sqrt(second / (1 - beta2**step)) + optim.eps)
            p.copy_(p - lr * optim.weight_decay * p - lr * direction)
    return norm
