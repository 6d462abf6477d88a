"""Tests token budgets: each kind of pass uses its own budget, and null means the actor's or the critic's."""

from collections.abc import Iterator
from dataclasses import astuple, replace

import pytest
import torch
from torch import nn

from rlhf.config import (
    ActorConfig,
    BackendConfig,
    Config,
    CriticConfig,
    GuardsConfig,
    RefConfig,
    RewardModelConfig,
    RolloutConfig,
    RolloutCorrectionConfig,
)
from rlhf.learning.actor import Actor
from rlhf.learning.critic import Critic
from rlhf.learning.guards import Guards
from tests.support.numeric_ranks import single_rank
from tests.support.tiny_updates import balance_in_order, random_batch, tiny_qwen2, tiny_value_model
from tests.support.update_cases import engine

SAMPLES = 6
ONE_SAMPLE, ALL = 1, 1000


def test_null_means_the_budget_of_actor_or_critic():
    assert astuple(Config().token_budgets) == (16384,) * 6
    config = Config(actor=ActorConfig(ppo_max_token_len_per_gpu=5))
    assert astuple(config.token_budgets) == (5, 5, 5, 5, 5, 16384)
    config = replace(config, critic=CriticConfig(ppo_max_token_len_per_gpu=7))
    assert astuple(config.token_budgets) == (5, 5, 5, 7, 7, 16384)
    config = Config(
        actor=ActorConfig(ppo_max_token_len_per_gpu=1),
        rollout=RolloutConfig(log_prob_max_token_len_per_gpu=2),
        ref=RefConfig(log_prob_max_token_len_per_gpu=3),
        critic=CriticConfig(ppo_max_token_len_per_gpu=4, forward_max_token_len_per_gpu=5),
        reward_model=RewardModelConfig(forward_max_token_len_per_gpu=6),
    )
    assert astuple(config.token_budgets) == (1, 2, 3, 4, 5, 6)


@pytest.fixture
def rank() -> Iterator[None]:
    with single_rank():
        yield


class Calls:
    """Counts a model's forward passes."""

    def __init__(self, model: nn.Module) -> None:
        self._count = 0
        model.register_forward_pre_hook(self._called)

    def _called(self, *_: object) -> None:
        self._count += 1

    def pop(self) -> int:
        """Return the number of passes since the last call."""
        count, self._count = self._count, 0
        return count


@pytest.mark.usefixtures("rank")
@pytest.mark.parametrize(("update", "forward"), [(ONE_SAMPLE, ALL), (ALL, ONE_SAMPLE)])
def test_each_pass_uses_its_own_budget(update, forward):
    expected = [{ONE_SAMPLE: SAMPLES, ALL: 1}[budget] for budget in (forward, update)]
    batch = random_batch(seed=2, samples=SAMPLES)
    held = balance_in_order(batch)
    guards = Guards(GuardsConfig())
    guards.begin(1, 0.0)

    config = ActorConfig(ppo_max_token_len_per_gpu=update)
    backend = engine(tiny_qwen2(), config, BackendConfig())
    calls = Calls(backend.module)
    actor = Actor(
        backend,
        config,
        RolloutCorrectionConfig(),
        temperature=1.0,
        scale=9,
        log_prob_budget=forward,
    )
    log_probs = actor.all_log_probs(batch, held)
    found = [calls.pop()]
    actor.update(replace(batch, old_log_probs=log_probs), held, guards)
    assert [*found, calls.pop()] == expected

    backend = engine(tiny_value_model(), CriticConfig(), BackendConfig())
    calls = Calls(backend.module)
    critic = Critic(backend, CriticConfig(), scale=9, budget=update, forward_budget=forward)
    values = critic.all_values(batch, held)
    found = [calls.pop()]
    assert torch.equal(values != 0, batch.response_mask)
    critic.update(replace(batch, values=values), held, guards)
    assert [*found, calls.pop()] == expected
