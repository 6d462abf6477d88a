"""Tests degenerate batches: responses without tokens, constant returns, tokens with probability 0.

Nothing crashes or becomes NaN, and the rest of the batch is trained on as if these samples were absent.
"""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from rlhf.algorithms.advantages import EstimatorInput
from rlhf.algorithms.lookup import load_estimator
from rlhf.config import ActorConfig, AlgorithmConfig, BackendConfig, CriticConfig, GuardsConfig, PolicyLossConfig
from rlhf.config.algorithm_table import ESTIMATORS, POLICY_LOSSES
from rlhf.config.schema.actor import LOSS_AGG_MODES
from rlhf.config.schema.algorithm import KlCtrlConfig, RolloutCorrectionConfig
from rlhf.learning.actor import Actor
from rlhf.learning.credit import Advantages
from rlhf.learning.critic import Critic
from rlhf.learning.guards import Guards
from rlhf.learning.policy import Policy, response_log_probs
from rlhf.models.log_prob_head import with_log_probs
from tests.support.in_float64 import TOLERANCE, in_float64
from tests.support.numeric_ranks import single_rank
from tests.support.plain_update import on_grid
from tests.support.tiny_updates import EveryBatch, balance_in_order, fill, random_batch, tiny_qwen2, tiny_value_model
from tests.support.update_cases import OPTIM, engine

EMPTY = 2


def batch_with(empty: int, others: int) -> EveryBatch:
    """Return `empty` samples without response tokens, followed by `others` longer samples with a response."""
    batch = random_batch(seed=21, samples=empty + others, prompt=(3, 3))
    batch.response_lengths[:empty] = 0
    batch.response_mask[:empty] = False
    for tensor in (batch.rollout_log_probs, batch.advantages, batch.returns):
        assert tensor is not None
        tensor[:empty] = math.nan  # outside the mask, so it must not be read
    return replace(batch, staleness=torch.ones_like(batch.response_mask, dtype=torch.int32)).select(slice(None))


def guards() -> Guards:
    judge = Guards(GuardsConfig())
    judge.begin(1, 0.0)
    return judge


def critic_of(config: CriticConfig, budget: int = 64) -> Critic:
    model = engine(tiny_value_model(), config, BackendConfig())
    return Critic(model, config, scale=9, budget=budget, forward_budget=budget)


def trained(batch: EveryBatch, role: str, mode: str, budget: int) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return weights and metrics after one update with every term of the loss."""
    settings = {"ppo_max_token_len_per_gpu": budget, "loss_agg_mode": mode, "optim": OPTIM, "ppo_epochs": 2}
    judge = guards()
    with single_rank():
        if role == "critic":
            config = CriticConfig(**settings)
            critic = critic_of(config, budget)
            batch = replace(batch, values=critic.all_values(batch, balance_in_order(batch)))
            figures = critic.update(batch, balance_in_order(batch), judge)
            backend = critic.backend
        else:
            config = ActorConfig(
                **settings,
                policy_loss=PolicyLossConfig(role),
                use_kl_loss=True,
                kl_loss_coef=0.1,
                kl_loss_type="k3+",
                entropy_coeff=0.1,
            )
            backend = engine(tiny_qwen2(), config, BackendConfig())
            actor = Actor(
                backend,
                config,
                RolloutCorrectionConfig(),
                temperature=1.0,
                scale=9,
                log_prob_budget=budget,
            )
            reference, held = Policy(backend, 1.0, budget), balance_in_order(batch)
            batch = replace(
                batch,
                ref_log_probs=reference.all_log_probs(batch, held),
                old_log_probs=on_grid(actor.all_log_probs(batch, held)),
            )
            figures = actor.update(batch, held, judge)
        assert judge.rejected is None
        return {name: tensor.clone() for name, tensor in backend.full_tensors()}, figures


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("role", [*POLICY_LOSSES, "critic"])
@in_float64()
def test_a_micro_batch_of_empty_responses_changes_nothing(role, mode):
    expected = trained(batch_with(EMPTY, 6).select(slice(EMPTY, None)), role, mode, budget=200)
    found = trained(batch_with(EMPTY, 6), role, mode, budget=3 * EMPTY)  # all empty responses in one micro-batch
    assert all(math.isfinite(value) for value in found[1].values())
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("role", ["vanilla", "critic"])
def test_a_batch_with_only_empty_responses_has_no_metrics_of_tokens(role):
    _, figures = trained(batch_with(4, 0), role, "token-mean", budget=6)
    assert all(math.isfinite(value) for value in figures.values())
    who = "critic" if role == "critic" else "actor"
    assert figures.keys() == {f"{who}/{name}" for name in ("grad_norm", "lr", "empty_mini_batches")}


@pytest.mark.parametrize("columns", [0, 3])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimators_return_zeros_for_responses_without_tokens(name, columns):
    shape = (4, columns)
    unread = torch.full(shape, math.nan)
    inputs = EstimatorInput(unread, torch.zeros(shape), 2, values=unread, baselines=torch.ones(4))
    estimate = load_estimator(name)(inputs, AlgorithmConfig(adv_estimator=name, gamma=0.9))
    assert estimate.advantages.shape == shape
    assert not estimate.advantages.any()
    assert estimate.returns is None or not estimate.returns.any()


@pytest.mark.parametrize("kind", ["fixed", "adaptive"])
def test_responses_without_tokens_have_no_kl_in_the_reward(kind):
    config = AlgorithmConfig(use_kl_in_reward=True, kl_ctrl=KlCtrlConfig(type=kind, kl_coef=0.5))
    batch = batch_with(4, 0)
    batch.old_log_probs = batch.ref_log_probs = batch.rollout_log_probs
    with single_rank():
        advantages = Advantages(config, group_size=2)
        figures = fill(advantages, batch, guards())
    assert figures == {"reward/kl": 0, "reward/kl_coef": 0.5, "advantages/mean": 0, "advantages/std": 0}
    assert advantages.kl_coef == 0.5


@pytest.mark.parametrize("constant", [0.1, -3.7, 0.0])
def test_explained_variance_of_constant_returns_is_zero(constant):
    batch = random_batch(seed=5, samples=6)
    # Add float32 rounding: a difference of one unit in the last place does not count as variance.
    noise = torch.nextafter(torch.tensor(constant), torch.tensor(9.0)) - constant if constant else 0.0
    batch.returns = constant + noise * (torch.arange(batch.returns.numel()).view_as(batch.returns) % 2)
    _, figures = trained(batch, "critic", "token-mean", budget=200)
    assert figures["critic/explained_variance"] == 0


def test_values_with_a_constant_error_have_explained_variance_one():
    batch = random_batch(seed=5, samples=6)
    config = CriticConfig(optim=OPTIM)
    with single_rank():
        critic = critic_of(config)
        values = critic.all_values(batch, balance_in_order(batch))
        figures = critic.update(replace(batch, values=values, returns=values + 3), balance_in_order(batch), guards())
    assert figures["critic/explained_variance"] == pytest.approx(1)


@pytest.mark.parametrize("rows", [4, 6, 8])
def test_explained_variance_is_over_all_mini_batches(rows):
    """Mini-batches differ in length and level, so a mean of their explained variances would be a different number."""
    batch = random_batch(seed=7, samples=8, response=(2, 9)).select(slice(8 - rows, None))
    batch.response_lengths[: rows // 2] = 1
    batch.response_mask[: rows // 2, 1:] = 0
    levels = torch.where(torch.arange(rows) < rows // 2, 3.0, 0.0)[:, None]
    returns = (levels + torch.randn(batch.response_mask.shape, generator=torch.Generator().manual_seed(rows))).float()
    config, inside = CriticConfig(optim=OPTIM), batch.response_mask.bool()
    with single_rank():
        critic = critic_of(config)
        values = critic.all_values(batch, balance_in_order(batch)) + levels
        figures = critic.update(replace(batch, values=values, returns=returns), balance_in_order(batch, 2), guards())
    target, error = returns[inside].double(), (returns.double() - values)[inside]
    expected = 1 - error.var(correction=0) / target.var(correction=0)
    assert figures["critic/explained_variance"] == pytest.approx(float(expected), rel=1e-9)


@in_float64()
def test_a_token_with_probability_zero_adds_nothing_to_the_entropy():
    batch = random_batch(seed=4, samples=5)
    banned = [0, *set(range(1, 40)) - set(batch.input_ids.unique().tolist())][:4]
    assert 0 in banned  # the padding token
    model = tiny_qwen2()
    # Models do this for entries that pad their vocabulary.
    model.lm_head.bias = nn.Parameter(torch.zeros(40).index_fill_(0, torch.tensor(banned), -math.inf))
    log_probs, entropy = response_log_probs(with_log_probs(model), batch, 0.7, with_entropy=True)
    assert torch.isfinite(log_probs).all()
    (log_probs + 0.3 * entropy).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    # Compute the same from a softmax over the other tokens.
    kept = [token for token in range(40) if token not in banned]
    logits = model(input_ids=batch.input_ids, use_cache=False).logits.double()[..., kept] / 0.7
    every = torch.log_softmax(logits, dim=-1)
    total = torch.zeros((), dtype=torch.float64)
    for row in range(len(batch)):
        for t in range(int(batch.response_lengths[row])):
            place = int(batch.prompt_lengths[row]) + t
            of_token = every[row, place - 1]
            expected = -(of_token.exp() * of_token).sum()
            assert float(entropy[row, t].detach()) == pytest.approx(float(expected.detach()), abs=TOLERANCE)
            total = total + of_token[kept.index(int(batch.input_ids[row, place]))] + 0.3 * expected
    total.backward()
    torch.testing.assert_close(
        gradients, {n: p.grad for n, p in model.named_parameters()}, rtol=TOLERANCE, atol=TOLERANCE
    )
