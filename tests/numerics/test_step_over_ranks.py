"""Tests that the loop's estimate and updates on four ranks equal those on one rank.

Samples are generated on some ranks and trained on by others; some ranks have no samples.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf import loop
from rlhf.backends.fsdp2 import Fsdp2Model
from rlhf.config import ActorConfig, AlgorithmConfig, BackendConfig, CriticConfig, GuardsConfig, KlCtrlConfig
from rlhf.config.derived import needs_old_log_probs
from rlhf.config.schema.algorithm import RolloutCorrectionConfig
from rlhf.learning.actor import Actor
from rlhf.learning.credit import Advantages
from rlhf.learning.critic import Critic
from rlhf.learning.guards import Guards
from rlhf.learning.policy import Policy
from rlhf.learning.resharding import SampleResharder
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.gloo import GlooTransport
from rlhf.ranks.phase_clock import PhaseClock
from tests.support.in_float64 import TOLERANCE, in_float64
from tests.support.numeric_ranks import run_ranks
from tests.support.tiny_updates import EveryBatch, random_batch, tiny_value_model, with_observations
from tests.support.update_cases import CPU, OPTIM, engine, start_policies

RANKS, GROUP, MINI_BATCHES, BUDGET = 4, 2, 2, 40
ADAPTIVE = KlCtrlConfig("adaptive", 0.3, 0.5, 40)
CASES: dict[str, tuple[int, AlgorithmConfig]] = {
    "gae with the KL in the reward": (10, AlgorithmConfig("gae", 0.9, 0.8, use_kl_in_reward=True, kl_ctrl=ADAPTIVE)),
    "fewer samples in a mini-batch than ranks": (
        2,
        AlgorithmConfig("gae", 0.9, 0.8, use_kl_in_reward=True, kl_ctrl=ADAPTIVE),
    ),
    "grpo": (10, AlgorithmConfig("grpo")),
    "truncated responses masked": (10, AlgorithmConfig("gae", 0.9, 0.8, mask_truncated_responses=True)),
}


def rollout_of(prompts: int, coordinator: Coordinator) -> tuple[EveryBatch, list[int]]:
    """Return this rank's rollout batch and its uids. With several ranks, rank 0 has no samples."""
    whole = with_observations(random_batch(seed=6, samples=prompts * GROUP, response=(1, 20)))
    whole = replace(whole, advantages=None, returns=None, scores=torch.arange(prompts * GROUP) % 3 / 2)
    # Truncate some single samples, and both samples of the last prompt.
    whole.truncated = (torch.arange(prompts * GROUP) % 5 == 1) | (torch.arange(prompts * GROUP) >= prompts * GROUP - 2)
    makers = list(range(1, coordinator.world_size)) or [0]
    mine = [group for group in range(prompts) if makers[group * len(makers) // prompts] == coordinator.rank]
    rows = [group * GROUP + sample for group in mine for sample in range(GROUP)]
    return whole.select(torch.tensor(rows, dtype=torch.int64)), [row // GROUP for row in rows]


def one_step(prompts: int, algorithm: AlgorithmConfig) -> dict[str, Any]:
    coordinator = Coordinator(GlooTransport())
    guards, settings = Guards(GuardsConfig()), {"optim": OPTIM, "ppo_max_token_len_per_gpu": BUDGET, "ppo_epochs": 2}
    guards.begin(1, 0.0)
    actor, critic = ActorConfig(**settings, use_kl_loss=True, kl_loss_coef=0.1), CriticConfig(**settings)
    policy, reference = start_policies("one_look_at_each_sample")
    c: Any = SimpleNamespace(
        guards=guards,
        clock=PhaseClock(CPU),
        critic_warmup=0,
        needs_old_log_probs=needs_old_log_probs(actor, algorithm, MINI_BATCHES),
        advantages=Advantages(algorithm, GROUP),
        reference=Policy(Fsdp2Model(reference.requires_grad_(False), BackendConfig(), CPU), 1.0, BUDGET),
        actor=Actor(
            engine(policy, actor, BackendConfig()),
            actor,
            RolloutCorrectionConfig("token"),
            temperature=1.0,
            scale=20,
            log_prob_budget=BUDGET,
        ),
        critic=None,
    )
    if algorithm.adv_estimator == "gae":
        values = engine(tiny_value_model(), critic, BackendConfig())
        c.critic = Critic(values, critic, scale=20, budget=BUDGET, forward_budget=BUDGET)
    rollout, uids = rollout_of(prompts, coordinator)
    training = SampleResharder(MINI_BATCHES, coordinator).reshard(rollout, uids, 1)
    batches, credit, estimated = loop.estimate(c, rollout, training)
    figures = estimated | loop.update(c, batches, training, 1)
    assert guards.rejected is None
    weights = {name: tensor.clone() for name, tensor in c.actor.backend.full_tensors()}
    if c.critic is not None:
        weights |= {f"critic.{name}": tensor.clone() for name, tensor in c.critic.backend.full_tensors()}
    by_sample = zip(uids, credit.advantages, credit.mask, strict=True)
    advantages = {(uid, row % GROUP): a[m.bool()].tolist() for row, (uid, a, m) in enumerate(by_sample)}
    idle = any(not held for of_ranks in training.balance.lengths for held in of_ranks)
    tokens = [int(mask.sum()) for mask in (credit.mask, batches[0].response_mask)]
    return {
        "figures": figures,
        "weights": weights,
        "advantages": advantages,
        "rows": len(training.batch),
        "idle": idle,
        "tokens": tokens,
    }


@in_float64()
def every_case() -> dict[str, Any]:
    return {name: one_step(*case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def ranks() -> dict[int, list[dict[str, Any]]]:
    return {size: run_ranks(size, every_case) for size in (1, RANKS)}


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_the_same_on_any_number_of_ranks(ranks, case):
    [single], several = ([rank[case] for rank in ranks[size]] for size in (1, RANKS))
    rows = [rank["rows"] for rank in several]
    assert sum(rows) == single["rows"]
    for of_ranks in ([single], several):
        in_rollout, in_training = (sum(rank["tokens"][i] for rank in of_ranks) for i in (0, 1))
        assert in_rollout == in_training == single["tokens"][0], "masks of rollout and training batches agree"
    assert several[0]["idle"] == (case == "fewer samples in a mini-batch than ranks")
    assert not several[0]["advantages"], "the first rank generated nothing"
    advantages = {sample: values for rank in several for sample, values in rank["advantages"].items()}
    assert advantages.keys() == single["advantages"].keys()
    options = {"rtol": TOLERANCE, "atol": TOLERANCE}
    torch.testing.assert_close(advantages, single["advantages"], **options)
    for rank in several:
        assert rank["figures"] == several[0]["figures"]
        torch.testing.assert_close(rank["weights"], several[0]["weights"], rtol=0, atol=0)
    torch.testing.assert_close(several[0]["weights"], single["weights"], **options)
    torch.testing.assert_close(several[0]["figures"], single["figures"], **options)
    start, _ = start_policies("one_look_at_each_sample")
    assert any(
        not torch.allclose(single["weights"][name], p.double(), atol=1e-3) for name, p in start.named_parameters()
    )
