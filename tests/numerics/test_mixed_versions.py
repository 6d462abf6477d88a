"""Compares updates on samples of several policy versions with loops over float64 tokens, for every algorithm.

The behaviour policy of a token is the policy that drew it (the log-probs of the sample). The proximal policy is the
policy before the update. The loss is min(p_proximal / p_behaviour, bound) times the clipped loss around the proximal
policy: Hilton et al. (arXiv 2110.00641), equation 4, and AReaL (arXiv 2505.24298), equation 5.
"""

import copy
import math
import random
from dataclasses import dataclass, replace
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rlhf import loop
from rlhf.backends.fsdp2 import Fsdp2Model
from rlhf.config import BackendConfig, Config, GuardsConfig, OptimConfig, RolloutCorrectionConfig
from rlhf.config.algorithm_table import ALGORITHMS
from rlhf.config.derived import needs_old_log_probs
from rlhf.experience.collate import collate
from rlhf.experience.groups import Group
from rlhf.learning.actor import Actor
from rlhf.learning.credit import Advantages
from rlhf.learning.critic import Critic
from rlhf.learning.guards import Guards
from rlhf.learning.policy import Policy
from rlhf.learning.resharding import SampleResharder
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.gloo import GlooTransport
from rlhf.ranks.phase_clock import PhaseClock
from rlhf.reward import RewardResult
from rlhf.rollout import Sample
from tests.support.in_float64 import in_float64
from tests.support.numeric_ranks import run_ranks, single_rank
from tests.support.tiny_updates import VOCAB, tiny_qwen2, tiny_value_model
from tests.support.update_cases import CPU, engine, start_policies

PROMPTS, N, STEP, MINI_BATCHES, EPOCHS, SCALE = 4, 4, 3, 2, 2, 9
OPTIM = OptimConfig(lr=0.02, betas=[0.9, 0.99], eps=1e-2, weight_decay=0.0)
NEAR = 1e-6
CORRECTIONS = {
    "token": RolloutCorrectionConfig("token", rollout_is_threshold=1.3),
    "sequence": RolloutCorrectionConfig("sequence", rollout_is_threshold=1.5),
    "icepop": RolloutCorrectionConfig("token", rollout_is_threshold=1.5, rollout_is_threshold_lower=0.7),
    "only older tokens": RolloutCorrectionConfig(None, rollout_is_threshold=1.3),
    "masked tokens": RolloutCorrectionConfig("token", 1.3, rollout_rs="token_k1", rollout_rs_threshold=1.6),
    "masked responses": RolloutCorrectionConfig(
        "token", 1.3, rollout_rs="seq_mean_k1", rollout_rs_threshold=1.15, rollout_rs_threshold_lower=0.8
    ),
}
ON_TWO_RANKS = [*(("grpo", kind) for kind in CORRECTIONS), ("ppo", "only older tokens"), ("clip_cov", "masked tokens")]
# kl_cov's penalty is |log-ratio|. In the first optimizer step the log-ratio is 0 up to rounding, so the sign of the
# gradient depends on the processor. `test_losses` compares the loss.
OTHERS = [name for name in ALGORITHMS if name not in ("grpo", "kl_cov")]
CASES = [*ON_TWO_RANKS, *((name, "token") for name in OTHERS), ("gspo", "sequence")]


@dataclass
class Token:
    """One token that the policy wrote: its position in the response, behaviour log-prob and age in steps."""

    at: int
    behaviour: float
    age: int


def tokens_of(sample: Sample) -> list[Token]:
    """Return the policy's tokens of a sample, without the tokens of its environment."""
    observed = {t for start, end in sample.observations for t in range(start, end)}
    found = []
    for t in range(len(sample)):
        drawn_by = next(version for version, end in sample.versions if t < end)
        if t not in observed:
            found.append(Token(t, float(sample.log_probs[t]), STEP - 1 - drawn_by))
    return found


def random_groups() -> list[Group]:
    """Return groups whose samples were begun by version 0, 1 or 2 and finished by a later one, some with observations.

    The log-probs are those of version 2, the current policy, with more noise the older the token.
    """
    rng, policy = random.Random(5), copy.deepcopy(tiny_qwen2()).double()
    groups = []
    for uid in range(PROMPTS):
        prompt, samples = [rng.randrange(1, VOCAB) for _ in range(rng.randint(2, 6))], []
        for number in range(N):
            length, begun = rng.randint(4, SCALE), rng.randint(0, STEP - 1)
            cuts = sorted(rng.sample(range(1, length), STEP - 1 - begun))
            versions = tuple(zip(range(begun, STEP), [*cuts, length], strict=True))
            ids = np.array([rng.randrange(1, VOCAB) for _ in range(length)], np.int32)
            exact = log_probs_of(policy, prompt, ids)[0].tolist()
            ages = [STEP - 1 - next(v for v, end in versions if t < end) for t in range(length)]
            noisy = [p + rng.gauss(0, 0.05 + 0.3 * age) for p, age in zip(exact, ages, strict=True)]
            spans = ((1, 3),) if number == 1 else ()
            log_probs = np.array(noisy, np.float32)
            samples.append(Sample(uid, number, ids, log_probs, "stop", versions, spans))
        results = [RewardResult(score, {"score": score}) for score in (rng.choice([0.0, 0.5, 1.0]) for _ in samples)]
        groups.append(Group(uid, prompt, samples, results, [0.0] * N, 0.25 * uid))
    return groups


def log_probs_of(model: nn.Module, prompt: list[int], ids: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return the log-probs of a response, and the model's outputs before each of its tokens."""
    whole = torch.tensor([*prompt, *ids.tolist()])
    outputs = model(input_ids=whole[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
    every = outputs - torch.logsumexp(outputs, dim=-1, keepdim=True)
    return every[torch.arange(len(ids)), whole[len(prompt) :] % every.shape[1]], outputs


def settings_of(name: str, kind: str) -> Config:
    """Return a row of the table, with larger coefficients of the KL and without randomly chosen tokens."""
    config: Any = Config()
    changes = {"algorithm.kl_ctrl.kl_coef": 0.2, "actor.kl_loss_coef": 0.3, "actor.ppo_max_token_len_per_gpu": 60}
    changes |= {"actor.policy_loss.clip_cov_ratio": 1.0, "actor.policy_loss.clip_cov_lb": 0.2}
    changes |= {"actor.policy_loss.kl_cov_ratio": 0.2, "actor.policy_loss.ppo_kl_coef": 0.5, "actor.optim": OPTIM}
    changes |= {"actor.ppo_epochs": EPOCHS, "algorithm.rollout_correction": CORRECTIONS[kind], "critic.optim": OPTIM}
    for key, value in (ALGORITHMS[name].settings() | changes).items():
        *path, last = key.split(".")
        section = config
        for part in path:
            section = getattr(section, part)
        setattr(section, last, value)
    return config


def ours(config: Config, groups: list[Group]) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return the weights and metrics of the loop's estimate and update on this process group."""
    coordinator, guards = Coordinator(GlooTransport()), Guards(GuardsConfig())
    guards.begin(STEP, 0.0)
    policy, reference = start_policies("")
    actor, budget = config.actor, config.actor.ppo_max_token_len_per_gpu
    correction = config.algorithm.rollout_correction
    model = engine(policy, actor, BackendConfig())
    c: Any = SimpleNamespace(
        guards=guards,
        clock=PhaseClock(CPU),
        critic_warmup=0,
        needs_old_log_probs=needs_old_log_probs(actor, config.algorithm, MINI_BATCHES),
        advantages=Advantages(config.algorithm, N),
        reference=Policy(Fsdp2Model(reference.requires_grad_(False), BackendConfig(), CPU), 1.0, budget),
        actor=Actor(model, actor, correction, temperature=1.0, scale=SCALE, log_prob_budget=budget),
        critic=None,
    )
    if config.algorithm.adv_estimator == "gae":
        values = engine(tiny_value_model(), config.critic, BackendConfig())
        c.critic = Critic(values, config.critic, scale=SCALE, budget=budget, forward_budget=budget)
    mine = [group for group in groups if group.uid % coordinator.world_size == coordinator.rank]
    rollout = collate(mine, 0, STEP - 1, CPU)
    assert rollout.baselines is not None
    wide = {name: getattr(rollout, name).double() for name in ("rollout_log_probs", "scores", "baselines")}
    rollout = replace(rollout, **wide)
    uids = [group.uid for group in mine for _ in group.samples]
    training = SampleResharder(MINI_BATCHES, coordinator).reshard(rollout, uids, STEP)
    batches, _, _ = loop.estimate(c, rollout, training)
    metrics = loop.update(c, batches, training, STEP)
    assert guards.rejected is None
    return {name: tensor.clone() for name, tensor in model.full_tensors()}, metrics


class Expected:
    """The update by loops over samples and tokens."""

    def __init__(self, config: Config, groups: list[Group]) -> None:
        self.config, self.correction = config, config.algorithm.rollout_correction
        policy, reference = (copy.deepcopy(model).double() for model in start_policies(""))
        self.policy = policy
        self.rows = [(group.prompt_ids, sample) for group in groups for sample in group.samples]
        self.tokens = [tokens_of(sample) for _, sample in self.rows]
        with torch.no_grad():
            self.old = self.log_probs(policy)
            self.ref = [row.detach() for row in self.log_probs(reference)]
            value_model = tiny_value_model().double()
            self.values = [log_probs_of(value_model, p, s.token_ids)[1][:, 0].tolist() for p, s in self.rows]
        self.advantages = self.estimated(groups)
        self.weights = [self.weights_of(s) for s in range(len(self.rows))]
        self.kept = [self.kept_of(s) for s in range(len(self.rows))]

    def log_probs(self, model: nn.Module) -> list[Tensor]:
        return [log_probs_of(model, prompt, sample.token_ids)[0] for prompt, sample in self.rows]

    def ratios(self, s: int) -> list[float]:
        """Return log p_proximal - log p_behaviour of the tokens of a sample."""
        return [float(self.old[s][token.at]) - token.behaviour for token in self.tokens[s]]

    def weights_of(self, s: int) -> list[float]:
        c, logs = self.correction, self.ratios(s)
        weights = []
        for token, log in zip(self.tokens[s], logs, strict=True):
            ratio = math.exp(math.fsum(logs) if c.rollout_is == "sequence" else log)
            if c.rollout_is_threshold_lower is not None:
                weight = ratio if c.rollout_is_threshold_lower <= ratio <= c.rollout_is_threshold else 0.0
            else:
                weight = min(ratio, c.rollout_is_threshold)
            weights.append(1.0 if c.rollout_is is None and token.age == 0 else weight)
        return weights

    def kept_of(self, s: int) -> list[bool]:
        c, logs = self.correction, self.ratios(s)
        if c.rollout_rs is None or c.rollout_rs_threshold is None:
            return [True] * len(logs)
        if c.rollout_rs == "seq_mean_k1":
            logs = [math.fsum(logs) / len(logs)] * len(logs)
        low = c.rollout_rs_threshold_lower or 1 / c.rollout_rs_threshold
        return [low <= math.exp(log) <= c.rollout_rs_threshold for log in logs]

    def estimated(self, groups: list[Group]) -> list[list[float]]:
        """Return the advantage of each token."""
        a, name = self.config.algorithm, self.config.algorithm.adv_estimator
        rewards = []
        for s, score in enumerate(score for group in groups for score in group.scores):
            of_tokens = [0.0] * (len(self.tokens[s]) - 1) + [score]
            if a.use_kl_in_reward:
                kl = [float(self.old[s][token.at] - self.ref[s][token.at]) for token in self.tokens[s]]
                of_tokens = [r - a.kl_ctrl.kl_coef * k for r, k in zip(of_tokens, kl, strict=True)]
            rewards.append(of_tokens)
        if name in ("gae", "reinforce_plus_plus", "remax"):
            togo = [[math.fsum(row[i:]) for i in range(len(row))] for row in rewards]  # gamma and lambda are 1
            if name == "remax":
                return [[g - float(groups[s // N].baseline or 0) for g in row] for s, row in enumerate(togo)]
            if name == "gae":
                togo = [
                    [g - self.values[s][token.at] for g, token in zip(row, self.tokens[s], strict=True)]
                    for s, row in enumerate(togo)
                ]
            return whitened(togo)
        totals = [math.fsum(row) for row in rewards]
        by_response = [x for i in range(0, len(totals), N) for x in self.in_group(totals[i : i + N])]
        spread = [[x] * len(row) for x, row in zip(by_response, rewards, strict=True)]
        return whitened(spread) if name == "reinforce_plus_plus_baseline" else spread

    def in_group(self, r: list[float]) -> list[float]:
        name, mean = self.config.algorithm.adv_estimator, math.fsum(r) / N
        if name == "rloo":
            return [x - (math.fsum(r) - x) / (N - 1) for x in r]
        if name == "pass_at_k":
            best = {each: max(r[i] for i in each) for each in combinations(range(N), self.config.algorithm.pass_at_k)}
            of_all = math.fsum(best.values()) / len(best)
            std = math.sqrt(math.fsum((x - of_all) ** 2 for x in best.values()) / len(best))
            own = [[x for each, x in best.items() if i in each] for i in range(N)]
            return [(math.fsum(xs) / len(xs) - of_all) / (std + 1e-6) for xs in own]
        std = math.sqrt(math.fsum((x - mean) ** 2 for x in r) / (N - 1))
        divides = name == "grpo" and self.config.algorithm.norm_adv_by_std_in_grpo
        return [(x - mean) / ((std + 1e-6) if divides else 1.0) for x in r]

    def chosen(self, mini: list[int], now: list[Tensor]) -> set[tuple[int, int]]:
        """Return (sample, index of the token) for Clip-Cov and KL-Cov."""
        actor, settings = self.config.actor, self.config.actor.policy_loss
        if settings.loss_mode not in ("clip_cov", "kl_cov"):
            return set()
        flat = [(s, i) for s in mini for i in range(len(self.tokens[s])) if self.kept[s][i]]
        p = {(s, i): float(now[s][self.tokens[s][i].at].detach()) for s, i in flat}
        a = {(s, i): self.advantages[s][i] for s, i in flat}
        mean_p, mean_a = math.fsum(p.values()) / len(flat), math.fsum(a.values()) / len(flat)
        covariance = {key: (p[key] - mean_p) * (a[key] - mean_a) for key in flat}
        if settings.loss_mode == "kl_cov":
            return set(sorted(flat, key=lambda key: -covariance[key])[: int(settings.kl_cov_ratio * len(flat))])
        found = set()
        for s, i in flat:
            ratio, bounds = math.exp(p[s, i] - float(self.old[s][self.tokens[s][i].at])), actor
            near = min(max(ratio, 1 - bounds.clip_ratio_low), 1 + bounds.clip_ratio_high)
            if settings.clip_cov_lb < covariance[s, i] < settings.clip_cov_ub and -a[s, i] * near <= -a[s, i] * ratio:
                found.add((s, i))
        return found

    def loss(self, mini: list[int]) -> Tensor:
        actor, now = self.config.actor, self.log_probs(self.policy)
        chosen, of_responses, counted = self.chosen(mini, now), [], 0
        for s in mini:
            kept, losses = [i for i, kept in enumerate(self.kept[s]) if kept], []
            logs = [now[s][token.at] - self.old[s][token.at].detach() for token in self.tokens[s]]
            for i in kept:
                of_sequence = torch.stack([logs[j] for j in kept]).mean()
                p, ratio = now[s][self.tokens[s][i].at], torch.exp(logs[i])
                loss = self.weights[s][i] * policy_loss(
                    actor, p, ratio, of_sequence, logs[i], self.advantages[s][i], (s, i) in chosen
                )
                if actor.use_kl_loss:
                    d = p - self.ref[s][self.tokens[s][i].at]
                    # The trainer bounds k3, as verl does.
                    kl = d**2 / 2 if actor.kl_loss_type == "k2" else (torch.exp(-d) - 1 + d).clamp(max=10)
                    loss = loss + actor.kl_loss_coef * kl
                losses.append(loss)
            counted += len(losses)
            if losses:
                of_responses.append(torch.stack(losses))
        if actor.loss_agg_mode == "token-mean":
            return torch.cat(of_responses).sum() / counted
        lengths = [SCALE if actor.loss_agg_mode == "seq-mean-token-sum-norm" else len(row) for row in of_responses]
        sums = [row.sum() / length for row, length in zip(of_responses, lengths, strict=True)]
        return torch.stack(sums).sum() / len(sums)

    def train(self) -> dict[str, Tensor]:
        optim = torch.optim.AdamW(
            self.policy.parameters(), lr=OPTIM.lr, betas=(0.9, 0.99), eps=OPTIM.eps, weight_decay=0.0
        )
        size = len(self.rows) // MINI_BATCHES
        for start in [*range(0, len(self.rows), size)] * EPOCHS:
            optim.zero_grad()
            self.loss(list(range(start, start + size))).backward()
            nn.utils.clip_grad_norm_(self.policy.parameters(), self.config.actor.grad_clip)
            optim.step()
        return {name: p.detach() for name, p in self.policy.named_parameters()}

    def effective_sample_size(self) -> float:
        flat = [w for row in self.weights for w in row]
        return math.fsum(flat) ** 2 / math.fsum(w * w for w in flat) / len(flat)


def whitened(rows: list[list[float]]) -> list[list[float]]:
    flat = [x for row in rows for x in row]
    mean = math.fsum(flat) / len(flat)
    variance = math.fsum((x - mean) ** 2 for x in flat) / (len(flat) - 1)
    return [[(x - mean) / math.sqrt(variance + 1e-8) for x in row] for row in rows]


def policy_loss(
    actor: Any, p: Tensor, ratio: Tensor, of_sequence: Tensor, log: Tensor, a: float, chosen: bool
) -> Tensor:
    """Return the loss of a token with the log-prob `p`, by the equations of the loss's paper."""
    mode, low, high = actor.policy_loss.loss_mode, 1 - actor.clip_ratio_low, 1 + actor.clip_ratio_high
    if mode == "cispo":
        return -ratio.detach().clamp(low, high) * a * p
    if mode == "sapo":
        tau = actor.tau_pos if a > 0 else actor.tau_neg
        return -a * torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    if mode == "kl_cov":
        return -a * ratio + actor.policy_loss.ppo_kl_coef * float(chosen) * log.abs()
    if mode == "gspo":
        ratio = torch.exp(of_sequence.detach() + log - log.detach())
    loss = torch.maximum(-a * ratio, -a * ratio.clamp(low, high))
    if mode == "vanilla" and a < 0:
        loss = torch.minimum(loss, torch.tensor(-a * actor.clip_ratio_c))
    return loss * 0.0 if mode == "clip_cov" and chosen else loss


@in_float64()
def all_ours() -> dict[str, tuple[dict[str, Tensor], dict[str, float]]]:
    groups, cases = random_groups(), CASES if torch.distributed.get_world_size() == 1 else ON_TWO_RANKS
    return {f"{name}/{kind}": ours(settings_of(name, kind), groups) for name, kind in cases}


@pytest.fixture(scope="module")
def on_two_ranks() -> list[dict[str, Any]]:
    return run_ranks(2, all_ours)


@pytest.fixture(scope="module")
def on_one_rank() -> dict[str, Any]:
    with single_rank():
        return all_ours()


def test_samples_mix_versions():
    ages = [{token.age for token in tokens_of(sample)} for group in random_groups() for sample in group.samples]
    assert set().union(*ages) == {0, 1, 2}
    assert sum(len(each) > 1 for each in ages) > len(ages) / 2


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_an_update_agrees_with_the_loops(name, kind, on_one_rank, on_two_ranks):
    with in_float64():
        expected = Expected(settings_of(name, kind), random_groups())
        start = {key: p.detach().double() for key, p in start_policies("")[0].named_parameters()}
        after = expected.train()
    move = math.sqrt(sum(float((after[key] - start[key]).square().sum()) for key in start))
    assert move > 0.1
    case = f"{name}/{kind}"
    for weights, metrics in (on_one_rank[case], *(rank[case] for rank in on_two_ranks if case in rank)):
        away = math.sqrt(sum(float((after[key] - weights[key]).square().sum()) for key in start))
        assert away <= NEAR * move, f"{away / move:.1e} of the move"
        assert metrics["rollout/is_eff_sample_size"] == pytest.approx(expected.effective_sample_size(), rel=1e-9)
        assert metrics["rollout/is_eff_sample_size"] < 0.999
