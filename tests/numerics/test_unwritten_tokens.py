"""Tests tokens that the policy did not write, such as observations.

Advantages, losses and metrics do not depend on the values at these tokens, to the last bit.
"""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rlhf.config import (
    ActorConfig,
    AlgorithmConfig,
    BackendConfig,
    CriticConfig,
    GuardsConfig,
    OverlongBufferConfig,
    PolicyLossConfig,
)
from rlhf.config.algorithm_table import ESTIMATORS, POLICY_LOSSES
from rlhf.config.schema.actor import LOSS_AGG_MODES
from rlhf.config.schema.algorithm import RolloutCorrectionConfig
from rlhf.experience.generation import Generation
from rlhf.learning.actor import Actor
from rlhf.learning.credit import Advantages
from rlhf.learning.critic import Critic
from rlhf.learning.guards import Guards
from rlhf.learning.policy import Policy
from rlhf.rollout import Sample, SamplingParams
from tests.support.numeric_ranks import single_rank
from tests.support.tiny_updates import (
    VOCAB,
    EveryBatch,
    balance_in_order,
    fill,
    random_batch,
    tiny_qwen2,
    tiny_value_model,
    with_observations,
)
from tests.support.update_cases import OPTIM, engine

GROUP = 3
PER_TOKEN = ("rollout_log_probs", "advantages", "returns", "values", "old_log_probs", "ref_log_probs")


def whole_batch() -> EveryBatch:
    """Return responses with observations between and after the policy's tokens, and with all per-token values."""
    batch = random_batch(seed=8, samples=12, response=(2, 9))
    batch.response_mask[torch.arange(12), batch.response_lengths - 1] = False  # the last token is an observation
    batch = with_observations(batch)
    assert (batch.response_mask.sum(1) > 0).all()
    generator = torch.Generator().manual_seed(3)
    old, ref, values = (torch.randn(batch.response_mask.shape, generator=generator) for _ in range(3))
    return replace(
        batch,
        old_log_probs=batch.rollout_log_probs + 0.1 * old,
        ref_log_probs=batch.rollout_log_probs + 0.1 * ref,
        values=values,
        baselines=batch.scores / 2,
        staleness=(torch.arange(old.numel()).view_as(old) % 2).int(),
    )


def disturbed(batch: EveryBatch) -> EveryBatch:
    """Return the batch with other values outside the mask, and another id for each sequence's last token."""
    outside = ~batch.response_mask
    changes: dict[str, Tensor] = {name: getattr(batch, name).masked_fill(outside, -math.inf) for name in PER_TOKEN}
    ids = batch.input_ids.clone()
    last = torch.arange(len(batch)), batch.prompt_lengths + batch.response_lengths - 1
    ids[last] = (ids[last] + 7) % VOCAB
    return replace(batch, input_ids=ids, **changes)


def guards() -> Guards:
    judge = Guards(GuardsConfig())
    judge.begin(1, 0.0)
    return judge


def trained(batch: EveryBatch, role: str, mode: str) -> dict[str, Tensor | float]:
    """Return weights and metrics after an update with every term of the loss."""
    settings = {"ppo_max_token_len_per_gpu": 60, "loss_agg_mode": mode, "optim": OPTIM}
    held = balance_in_order(batch, 2)
    trained: Actor | Critic
    with single_rank():
        if role == "critic":
            critic = CriticConfig(**settings)
            backend = engine(tiny_value_model(), critic, BackendConfig())
            trained = Critic(backend, critic, scale=9, budget=60, forward_budget=60)
        else:
            loss = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3+", "entropy_coeff": 0.1}
            actor = ActorConfig(**settings, **loss, policy_loss=PolicyLossConfig(role))
            correction = RolloutCorrectionConfig("sequence")
            backend = engine(tiny_qwen2(), actor, BackendConfig())
            trained = Actor(backend, actor, correction, temperature=1.0, scale=9, log_prob_budget=60)
        judge = guards()
        figures = trained.update(batch, held, judge)
        assert judge.rejected is None
        return {name: tensor.clone() for name, tensor in trained.backend.full_tensors()} | figures


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("role", [*POLICY_LOSSES, "critic"])
def test_an_update_does_not_depend_on_unwritten_tokens(role, mode):
    expected, found = (trained(batch, role, mode) for batch in (whole_batch(), disturbed(whole_batch())))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    written = replace(whole_batch(), response_mask=whole_batch().rollout_log_probs != 0)
    loss = "critic/loss" if role == "critic" else "actor/loss"
    assert trained(written, role, mode)[loss] != expected[loss], "with the tokens in the mask the loss differs"


@pytest.mark.parametrize("kl_in_reward", [False, True])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_advantages_do_not_depend_on_unwritten_tokens(name, kl_in_reward):
    batches = whole_batch(), disturbed(whole_batch())
    config = AlgorithmConfig(adv_estimator=name, gamma=0.9, lam=0.8, pass_at_k=1, use_kl_in_reward=kl_in_reward)
    with single_rank():
        expected, found = (fill(Advantages(config, GROUP), batch, guards()) for batch in batches)
    assert found == expected
    for result in ("token_rewards", "advantages", "returns"):
        one, other = (getattr(batch, result) for batch in batches)
        assert one is None if other is None else torch.equal(one, other)
        assert one is None or not one[~batches[0].response_mask].any()
    assert batches[0].advantages.any()
    # Responses without the unwritten tokens have the same advantages.
    short = squeezed(whole_batch())
    with single_rank():
        fill(Advantages(config, GROUP), short, guards())
    written = batches[0].response_mask
    torch.testing.assert_close(short.advantages[short.response_mask], batches[0].advantages[written])


def squeezed(batch: EveryBatch) -> EveryBatch:
    """Return the batch with the per-token values of the written tokens only, contiguous in each row."""
    written = batch.response_mask
    counts = written.sum(1)
    kept = torch.arange(int(counts.max())) < counts[:, None]
    changes = {}
    for name in PER_TOKEN:
        changes[name] = torch.zeros(kept.shape).masked_scatter(kept, getattr(batch, name)[written])
    return replace(batch, response_lengths=counts, response_mask=kept, **changes)


def test_log_probs_and_values_of_unwritten_tokens_are_zero():
    batch = whole_batch()
    with single_rank():
        backend = engine(tiny_qwen2(), ActorConfig(optim=OPTIM), BackendConfig())
        log_probs = Policy(backend, 1.0, 60).all_log_probs(batch, balance_in_order(batch))
        config = CriticConfig(optim=OPTIM)
        value_model = engine(tiny_value_model(), config, BackendConfig())
        critic = Critic(value_model, config, scale=9, budget=60, forward_budget=60)
        values = critic.all_values(batch, balance_in_order(batch))
    for found in (log_probs, values):
        assert torch.equal(found != 0, batch.response_mask)


def test_the_overlong_punishment_counts_written_tokens():
    generation = Generation.__new__(Generation)
    generation.params = SamplingParams(max_tokens=6)
    generation.overlong_buffer = OverlongBufferConfig(enable=True, len=2, penalty_factor=1.0)
    lengths = [(6, ()), (6, ((0, 1),)), (6, ((0, 2),)), (4, ())]
    samples = [Sample.of(0, 0, [1] * n, [0.0] * n, "stop", 0, spans) for n, spans in lengths]
    assert generation._penalties(samples) == [-1.0, -0.5, 0.0, 0.0]
