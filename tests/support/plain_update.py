"""Computes reference updates in float64: one process, one sequence at a time, no padding."""

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from rlhf.config import ActorConfig, Config, CriticConfig, RolloutCorrectionConfig
from rlhf.learning.token_choice import PURPOSE
from tests.support.tiny_updates import EveryBatch

Rows = list[list[Tensor]]
MiniLoss = Callable[[nn.Module, Sequence[int], dict[str, float]], Tensor]
SEED, STEP = 5, 3
"""Seed and step of shuffled mini-batches. The seed also chooses random tokens."""


@dataclass
class Plain:
    """Weights after an update, the gradient of every optimizer step, and the steps' mean metrics."""

    weights: dict[str, Tensor]
    gradients: list[dict[str, Tensor]]
    metrics: dict[str, float]


@dataclass
class Tokens:
    """Terms of a mini-batch's tokens, row by row."""

    rows: defaultdict[str, Rows] = field(default_factory=lambda: defaultdict(list))

    def add_row(self, *names: str) -> None:
        for name in names:
            self.rows[name].append([])

    def add(self, **values: Tensor | float) -> None:
        for name, value in values.items():
            self.rows[name][-1].append(torch.as_tensor(value, dtype=torch.float64))

    def mean(self, name: str) -> float:
        return float(torch.stack([value for row in self.rows[name] for value in row]).mean().detach())


def plain_actor(
    model: nn.Module, reference: nn.Module, batch: EveryBatch, config: Config, mini_batches: int, total_steps: int
) -> Plain:
    """Compute the policy's update without changing `model`."""
    policy, frozen = copy.deepcopy(model).double(), copy.deepcopy(reference).double()
    with torch.no_grad():
        old = [log_softmax_of(policy, batch, s)[0] for s in range(len(batch))]
        if config.actor.policy_loss.loss_mode == "kl_cov":
            old = list(map(on_grid, old))
        ref = [log_softmax_of(frozen, batch, s)[0] for s in range(len(batch))]

    bonus = PlainBonus(config.actor)

    def loss_of(policy: nn.Module, mini: Sequence[int], metrics: dict[str, float]) -> Tensor:
        return actor_loss(policy, batch, mini, old, ref, config, metrics, bonus)

    return walk(policy, config.actor, config.actor.shuffle, len(batch), mini_batches, total_steps, loss_of)


class PlainBonus:
    """Adapts the entropy coefficient per optimizer step by Skywork-OR1's formulas."""

    def __init__(self, config: ActorConfig) -> None:
        self.c, self.control, self.entropies = config.entropy_coeff, config.entropy_ctrl, list[float]()

    def coefficient(self, entropy: float) -> float:
        """Return the next step's coefficient; `entropy` adapts the coefficient after it."""
        if self.control.type == "fixed":
            return self.c
        target = self.control.target_entropy
        alpha = self.c if not self.entropies or self.entropies[-1] <= target else 0.0
        self.entropies.append(entropy)
        if entropy < target:
            self.c = min(self.c + self.control.delta, self.control.max_coeff)
        elif entropy > target:
            self.c = max(self.c - self.control.delta, self.control.min_coeff)
        return alpha


def plain_critic(model: nn.Module, batch: EveryBatch, config: Config, mini_batches: int, total_steps: int) -> Plain:
    """Compute the critic's update without changing `model`, which gives the old values."""
    critic = copy.deepcopy(model).double()
    with torch.no_grad():
        old = [values_of(critic, batch, s) for s in range(len(batch))]

    def loss_of(critic: nn.Module, mini: Sequence[int], metrics: dict[str, float]) -> Tensor:
        return critic_loss(critic, batch, mini, old, config, metrics)

    return walk(critic, config.critic, config.actor.shuffle, len(batch), mini_batches, total_steps, loss_of)


def walk(
    model: nn.Module,
    config: ActorConfig | CriticConfig,
    shuffle: bool,
    samples: int,
    mini_batches: int,
    total_steps: int,
    loss_of: MiniLoss,
) -> Plain:
    parameters = dict(model.named_parameters())
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in parameters.items()}
    gradients: list[dict[str, Tensor]] = []
    metrics: defaultdict[str, float] = defaultdict(float)
    size = samples // mini_batches
    for epoch in range(config.ppo_epochs):
        order = list(range(samples))
        if shuffle:
            bits = np.random.Philox(key=[SEED, STEP], counter=[0, 0, 0, epoch + 1]).random_raw(samples).tolist()
            order.sort(key=lambda sample: bits[sample])
        for start in range(0, samples, size):
            loss = loss_of(model, order[start : start + size], metrics)
            metrics["loss"] += float(loss.detach())
            model.zero_grad()
            loss.backward()
            gradients.append({name: p.grad.clone() for name, p in parameters.items()})
            lr = learning_rate(config, len(gradients) - 1, total_steps)
            metrics["grad_norm"] += adamw_step(parameters, moments, config, len(gradients), lr)
    means = {name: value / len(gradients) for name, value in metrics.items()} | {"lr": lr}
    return Plain({name: p.detach() for name, p in parameters.items()}, gradients, means)


def log_softmax_of(model: nn.Module, batch: EveryBatch, sample: int) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies of a sample's response tokens at temperature 1."""
    logits, ids, prompt, response = output_of(model, batch, sample)
    every = torch.log_softmax(logits, dim=-1)
    return torch.stack([every[i, ids[prompt + i]] for i in range(response)]), -(every.exp() * every).sum(dim=-1)


def on_grid(log_probs: Tensor) -> Tensor:
    """Round to 1/1024, so that log-probs that differ by rounding errors get the same bits.

    Rounded old log-probs also keep KL-Cov's |log ratio| away from 0, where rounding decides the sign of its slope.
    """
    return log_probs.mul(1024).round() / 1024


def values_of(model: nn.Module, batch: EveryBatch, sample: int) -> Tensor:
    """Return the values before each response token of a sample."""
    return output_of(model, batch, sample)[0][:, 0]


def written(batch: EveryBatch, sample: int) -> list[int]:
    """Return the positions of the policy's tokens in a sample's response."""
    return batch.response_mask[sample].nonzero()[:, 0].tolist()


def output_of(model: nn.Module, batch: EveryBatch, sample: int) -> tuple[Tensor, Tensor, int, int]:
    prompt, response = int(batch.prompt_lengths[sample]), int(batch.response_lengths[sample])
    ids = batch.input_ids[sample, : prompt + response]
    logits = model(input_ids=ids[None], use_cache=False).logits[0].double()
    return logits[prompt - 1 : prompt + response - 1], ids, prompt, response


def actor_loss(
    policy: nn.Module,
    batch: EveryBatch,
    mini: Sequence[int],
    old: list[Tensor],
    ref: list[Tensor],
    config: Config,
    metrics: dict[str, float],
    bonus: "PlainBonus",
) -> Tensor:
    """Return the policy's loss of a mini-batch, and add its metrics to `metrics`."""
    actor, tokens = config.actor, actor_tokens(policy, batch, mini, old, ref, config)
    pg_loss = aggregate(tokens.rows["pg"], actor.loss_agg_mode, config)
    coefficient = bonus.coefficient(tokens.mean("entropy"))
    loss = pg_loss - coefficient * aggregate(tokens.rows["bonus"], actor.loss_agg_mode, config)
    if actor.entropy_ctrl.type == "adaptive":
        metrics["entropy_coeff"] += coefficient
    metrics["pg_loss"] += float(pg_loss.detach())
    if actor.use_kl_loss:
        kl_loss = aggregate(tokens.rows["kl_loss"], actor.loss_agg_mode, config)
        loss = loss + actor.kl_loss_coef * kl_loss
        metrics["kl_loss"] += float(kl_loss.detach())
        metrics["ref_kl"] += tokens.mean("ref_kl")
    if actor.policy_loss.loss_mode in ("clip_cov", "kl_cov"):
        metrics[f"{actor.policy_loss.loss_mode}_frac"] += tokens.mean("chosen")
    for name in ("entropy", "kl"):
        metrics[name] += tokens.mean(name)
    metrics["rollout/logprob_diff_mean"] += tokens.mean("difference")
    metrics["rollout/kl"] += tokens.mean("engine_kl")
    if any(tokens.rows["weight"]):
        metrics["rollout/is_mean"] += tokens.mean("weight")
        metrics["rollout/is_truncated"] += tokens.mean("truncated")
    return loss


def actor_tokens(
    policy: nn.Module, batch: EveryBatch, mini: Sequence[int], old: list[Tensor], ref: list[Tensor], config: Config
) -> Tokens:
    """Compute each term of the policy's loss and metrics for every token of a mini-batch."""
    actor, correction = config.actor, config.algorithm.rollout_correction
    weighs = correction.rollout_is is not None or batch.staleness is not None
    tokens = Tokens()
    counted = {s: near_tokens(batch, s, old[s], correction) for s in mini}
    predicted = {s: log_softmax_of(policy, batch, s) for s in mini}
    chosen = chosen_tokens(batch, counted, {s: p.detach() for s, (p, _) in predicted.items()}, old, actor)
    for s in mini:
        log_probs, entropies = predicted[s]
        tokens.add_row("chosen")
        tokens.add_row(
            "pg", "kl_loss", "bonus", "entropy", "kl", "ref_kl", "difference", "engine_kl", "weight", "truncated"
        )
        sequence = torch.stack([log_probs[t] - old[s][t] for t in counted[s] or written(batch, s)]).mean()
        engine = {t: float(old[s][t] - batch.rollout_log_probs[s, t]) for t in written(batch, s)}
        for t in written(batch, s):
            log_prob = log_probs[t]
            loss = token_loss(log_prob, old[s][t], sequence, float(batch.advantages[s, t]), actor, (s, t) in chosen)
            if weighs:
                counts = correction.rollout_is is not None or bool(batch.staleness[s, t])
                weight, truncated = engine_weight(engine, t, correction) if counts else (1.0, False)
                tokens.add(weight=weight, truncated=float(truncated))
                loss = loss * weight
            tokens.add(entropy=entropies[t])
            if t in counted[s]:
                tokens.add(chosen=float((s, t) in chosen))
                to_ref = kl(log_prob - ref[s][t], actor.kl_loss_type)
                if actor.use_bias_correction_kl:
                    # An older policy sampled the token; the paper uses k3.
                    assert actor.kl_loss_type == "k3"
                    to_ref = to_ref * torch.exp(log_prob - old[s][t]) * (weight if weighs else 1.0)
                tokens.add(pg=loss, kl_loss=to_ref, bonus=entropies[t])
            tokens.add(kl=kl(old[s][t] - log_prob, "k3"), ref_kl=kl(log_prob - ref[s][t], "k3"))
            tokens.add(difference=abs(engine[t]), engine_kl=kl(torch.tensor(-engine[t], dtype=torch.float64), "k3"))
    return tokens


def engine_weight(engine: dict[int, float], token: int, correction: RolloutCorrectionConfig) -> tuple[float, bool]:
    """Return a token's loss weight and whether it is truncated; `engine` has the log ratios of the response."""
    ratio = math.exp(sum(engine.values()) if correction.rollout_is == "sequence" else engine[token])
    weight = min(ratio, correction.rollout_is_threshold)
    if (lowest := correction.rollout_is_threshold_lower) is not None:
        weight = ratio if lowest <= ratio == weight else 0.0
    return weight, ratio != weight


def near_tokens(batch: EveryBatch, sample: int, old: Tensor, correction: RolloutCorrectionConfig) -> list[int]:
    """Return the response positions in the loss, where the engine's policy is close to the policy before the update."""
    places, kind = written(batch, sample), correction.rollout_rs
    if kind is None:
        return places
    divergences = []
    for t in places:
        d = float(old[t].detach() - batch.rollout_log_probs[sample, t])
        divergences.append({"k1": d, "k2": d * d / 2, "k3": math.exp(d) - 1 - d}[kind[-2:]])
    upper, lower = correction.rollout_rs_threshold or 0.0, -math.inf
    if kind.endswith("k1"):
        upper, lower = math.log(upper), math.log(correction.rollout_rs_threshold_lower or 1 / upper)
    if kind.startswith("token"):
        return [t for t, d in zip(places, divergences, strict=True) if lower <= d <= upper]
    whole = {"sum": sum(divergences), "mean": sum(divergences) / len(places), "max": max(divergences)}
    return places if lower <= whole[kind.split("_")[1]] <= upper else []


def chosen_tokens(
    batch: EveryBatch,
    counted: dict[int, list[int]],
    log_probs: dict[int, Tensor],
    old: list[Tensor],
    config: ActorConfig,
    seed: int = SEED,
    step: int = 1,
) -> set[tuple[int, int]]:
    """Return (row, position) of the tokens that Clip-Cov drops or KL-Cov punishes."""
    settings, tokens = config.policy_loss, [(s, t) for s, places in counted.items() for t in places]
    if settings.loss_mode not in ("clip_cov", "kl_cov"):
        return set()
    p = {(s, t): float(log_probs[s][t]) for s, t in tokens}
    a = {(s, t): float(batch.advantages[s, t]) for s, t in tokens}
    mean_p, mean_a = (sum(values.values()) / len(tokens) for values in (p, a))
    covariance = {token: (p[token] - mean_p) * (a[token] - mean_a) for token in tokens}
    if settings.loss_mode == "kl_cov":
        ranked = sorted(tokens, key=lambda token: -covariance[token])
        return set(ranked[: max(int(settings.kl_cov_ratio * len(tokens)), 1)])
    candidates = []
    for s, t in tokens:
        ratio, advantage = math.exp(p[s, t] - float(old[s][t])), a[s, t]
        clipped = min(max(ratio, 1 - config.clip_ratio_low), 1 + config.clip_ratio_high)
        inside = settings.clip_cov_lb < covariance[s, t] < settings.clip_cov_ub
        if inside and -advantage * clipped <= -advantage * ratio:
            candidates.append((noise(seed, step, int(batch.uids[s]), int(batch.numbers[s]), PURPOSE, t), s, t))
    count = max(int(settings.clip_cov_ratio * len(tokens)), 1)
    return {(s, t) for _, s, t in sorted(candidates)[:count]}


def noise(*coordinates: int) -> int:
    """Return a signed 64-bit hash (splitmix64 of each coordinate in turn), computed with Python integers."""
    mask, golden = (1 << 64) - 1, 0x9E3779B97F4A7C15
    key = golden
    for value in coordinates:
        key = (key + value * golden) & mask
        key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9 & mask
        key = (key ^ (key >> 27)) * 0x94D049BB133111EB & mask
        key ^= key >> 31
    return key - (1 << 64) if key >> 63 else key


def token_loss(
    log_prob: Tensor, old: Tensor, sequence: Tensor, advantage: float, config: ActorConfig, chosen: bool
) -> Tensor:
    """Return a token's policy loss for each loss mode; `sequence` is the row's mean log-ratio."""
    low, high = 1 - config.clip_ratio_low, 1 + config.clip_ratio_high
    ratio = torch.exp(log_prob - old)
    if config.policy_loss.loss_mode == "cispo":
        return -ratio.detach().clamp(low, high) * advantage * log_prob
    if config.policy_loss.loss_mode == "kl_cov":
        return -advantage * ratio + config.policy_loss.ppo_kl_coef * chosen * (log_prob - old).abs()
    if config.policy_loss.loss_mode == "sapo":
        tau = config.tau_pos if advantage > 0 else config.tau_neg
        return -advantage * 4 / tau / (1 + torch.exp(-tau * (ratio - 1)))
    if config.policy_loss.loss_mode == "gspo":
        ratio = torch.exp(sequence)
        # With advantages per token, GSPO differentiates the row's ratio by the token's own log-prob.
        ratio = ratio.detach() * torch.exp(log_prob - log_prob.detach())
    loss = torch.max(-advantage * ratio, -advantage * ratio.clamp(low, high))
    if config.policy_loss.loss_mode == "clip_cov" and chosen:
        return loss * 0.0
    if config.policy_loss.loss_mode == "vanilla" and advantage < 0:
        loss = torch.min(loss, torch.tensor(-advantage * config.clip_ratio_c, dtype=torch.float64))
    return loss


def critic_loss(
    critic: nn.Module, batch: EveryBatch, mini: range, old: list[Tensor], config: Config, metrics: dict[str, float]
) -> Tensor:
    """Return the critic's loss of a mini-batch, and add its metrics to `metrics`."""
    tokens = Tokens()
    bound = config.critic.cliprange_value
    for s in mini:
        tokens.add_row("loss", "clipped", "value")
        values = values_of(critic, batch, s)
        for t in written(batch, s):
            value = values[t]
            target, before = float(batch.returns[s, t]), float(old[s][t])
            near = value.clamp(before - bound, before + bound)
            losses = 0.5 * (value - target) ** 2, 0.5 * (near - target) ** 2
            tokens.add(loss=torch.max(*losses), clipped=float(losses[1] > losses[0]), value=value)
    metrics["vf_clipfrac"] += tokens.mean("clipped")
    metrics["value_mean"] += tokens.mean("value")
    return aggregate(tokens.rows["loss"], config.critic.loss_agg_mode, config)


def kl(difference: Tensor, kind: str) -> Tensor:
    k2 = difference**2 / 2
    if kind.endswith("+"):
        return k2 - k2.detach() + kl(difference, kind[:-1]).detach()
    return {
        "k1": difference,
        "k2": k2,
        "k3": (torch.exp(-difference) - 1 + difference).clamp(max=10),
        "abs": difference.abs(),
    }[kind]


def aggregate(rows: Rows, mode: str, config: Config) -> Tensor:
    if mode == "token-mean":
        return torch.stack([value for row in rows for value in row]).mean()
    fixed = config.actor.loss_scale_factor or config.data.max_response_length
    rows = [row for row in rows if row]
    divisor = {"seq-mean-token-mean": None, "seq-mean-token-sum": 1, "seq-mean-token-sum-norm": fixed}[mode]
    return torch.stack([torch.stack(row).sum() / (divisor or len(row)) for row in rows]).mean()


def learning_rate(config: ActorConfig | CriticConfig, step: int, total_steps: int) -> float:
    """Return the rate of the cosine schedule with warm-up, the only schedule here."""
    optim = config.optim
    if optim.lr_scheduler_interval == "training_step":
        step = 0  # this update is the first training step, in the warm-up
    if step < optim.lr_warmup_steps:
        return optim.lr * (step + 1) / optim.lr_warmup_steps
    progress = (step - optim.lr_warmup_steps) / (total_steps - optim.lr_warmup_steps)
    floor = optim.min_lr_ratio
    return optim.lr * (floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2)


def adamw_step(
    parameters: dict[str, nn.Parameter],
    moments: dict[str, Sequence[Tensor]],
    config: ActorConfig | CriticConfig,
    step: int,
    lr: float,
) -> float:
    """Clip, step (Loshchilov and Hutter, arXiv 1711.05101, algorithm 2), and return the norm before clipping.

    The norms and biases of these models are vectors.
    """
    (beta1, beta2), optim = config.optim.betas, config.optim
    norm = math.sqrt(sum(float((p.grad**2).sum()) for p in parameters.values()))
    # torch's clipping adds 1e-6, too.
    scale = min(1.0, config.grad_clip / (norm + 1e-6))
    with torch.no_grad():
        for name, p in parameters.items():
            first, second = moments[name]
            gradient = p.grad * scale
            first.copy_(beta1 * first + (1 - beta1) * gradient)
            second.copy_(beta2 * second + (1 - beta2) * gradient**2)
            direction = (first / (1 - beta1**step)) / (torch.sqrt(second / (1 - beta2**step)) + optim.eps)
            decay = optim.weight_decay if p.ndim == 2 or optim.decay_norm_and_bias else 0.0
            p.copy_(p - lr * decay * p - lr * direction)
    return norm
