"""Tests masked truncated responses: estimators count their scores, and the update ignores them."""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from rlhf.config import ActorConfig, AlgorithmConfig, BackendConfig, CriticConfig, EntropyCtrlConfig, GuardsConfig
from rlhf.config.algorithm_table import ESTIMATORS
from rlhf.config.schema.actor import LOSS_AGG_MODES
from rlhf.config.schema.algorithm import RolloutCorrectionConfig
from rlhf.experience.collate import collate
from rlhf.experience.groups import Group
from rlhf.learning.actor import Actor
from rlhf.learning.credit import Advantages
from rlhf.learning.critic import Critic
from rlhf.learning.guards import Guards
from rlhf.reward import RewardResult
from rlhf.rollout import Sample
from tests.support.in_float64 import TOLERANCE, in_float64
from tests.support.numeric_ranks import single_rank
from tests.support.rounding import sum_bound
from tests.support.tiny_updates import EveryBatch, balance_in_order, fill, random_batch, tiny_qwen2, tiny_value_model
from tests.support.update_cases import OPTIM, engine

GROUP, SAMPLES = 3, 12
CUT = torch.arange(SAMPLES) % GROUP == 1
"""One truncated response per group, so that all mini-batches keep equally many responses."""


def batch() -> EveryBatch:
    made = random_batch(seed=9, samples=SAMPLES, response=(2, 9))
    figures = {"values": made.rollout_log_probs / 3, "baselines": made.scores / 2, "old_log_probs": None}
    return replace(made, scores=torch.arange(SAMPLES) % 5 / 2, truncated=CUT, **figures)


def guards() -> Guards:
    judge = Guards(GuardsConfig())
    judge.begin(1, 0.0)
    return judge


def filled(name: str, mask: bool) -> tuple[EveryBatch, dict[str, float]]:
    made = batch()
    config = AlgorithmConfig(adv_estimator=name, gamma=0.9, lam=0.8, pass_at_k=1, mask_truncated_responses=mask)
    with single_rank():
        return made, fill(Advantages(config, GROUP), made, guards())


@pytest.mark.parametrize("name", ESTIMATORS)
def test_scores_of_truncated_responses_count_but_their_advantages_are_zero(name: str) -> None:
    (masked, figures), (whole, plain) = filled(name, True), filled(name, False)
    assert figures.pop("advantages/truncated_masked") == CUT.sum() / SAMPLES
    assert "advantages/truncated_masked" not in plain
    assert masked.advantages is not None
    assert whole.advantages is not None
    assert torch.equal(masked.advantages[~CUT], whole.advantages[~CUT])
    assert whole.advantages[CUT].any()
    assert not masked.advantages[CUT].any()
    assert not masked.response_mask[CUT].any()
    assert torch.equal(masked.response_mask[~CUT], whole.response_mask[~CUT])
    kept = masked.advantages[masked.response_mask]
    error = sum_bound(len(kept)) * kept.abs().mean().item()
    assert figures["advantages/mean"] == pytest.approx(kept.mean().item(), rel=0, abs=error)
    assert figures["advantages/max"] == kept.max().item()


@functools.cache
@in_float64()
def trained(role: str, mode: str, absent: bool) -> dict[str, Any]:
    """Return weights and metrics after two epochs over two mini-batches, without the masked responses if `absent`."""
    made, _ = filled("gae", True)
    if absent:
        made = made.select(torch.nonzero(~CUT)[:, 0])
    settings: dict[str, Any] = {"ppo_max_token_len_per_gpu": 60, "loss_agg_mode": mode, "optim": OPTIM, "ppo_epochs": 2}
    trained: Actor | Critic
    with single_rank():
        if role == "critic":
            critic = CriticConfig(**settings)
            trained = Critic(
                engine(tiny_value_model(), critic, BackendConfig()), critic, scale=9, budget=60, forward_budget=60
            )
        else:
            actor, correction = ActorConfig(**settings, entropy_coeff=0.1), RolloutCorrectionConfig("sequence")
            backend = engine(tiny_qwen2(), actor, BackendConfig())
            trained = Actor(backend, actor, correction, temperature=1.0, scale=9, log_prob_budget=60)
            made.old_log_probs = made.rollout_log_probs
        figures = trained.update(made, balance_in_order(made, 2), guards())
        return {name: tensor.clone() for name, tensor in trained.backend.full_tensors()} | figures


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_the_update_equals_that_of_a_batch_without_truncated_responses(role: str, mode: str) -> None:
    torch.testing.assert_close(trained(role, mode, False), trained(role, mode, True), rtol=TOLERANCE, atol=TOLERANCE)


def test_a_mini_batch_without_tokens_is_a_step_that_does_not_adapt_the_entropy_bonus() -> None:
    """The mean entropy over no tokens would be 0, and would raise the adaptive bonus."""
    made, _ = filled("gae", True)
    made.response_mask[:6] = False
    control = EntropyCtrlConfig("adaptive", target_entropy=1e-3, delta=0.1)
    config = ActorConfig(ppo_max_token_len_per_gpu=60, optim=OPTIM, entropy_coeff=0.5, entropy_ctrl=control)
    with single_rank():
        backend, correction = engine(tiny_qwen2(), config, BackendConfig()), RolloutCorrectionConfig()
        actor = Actor(backend, config, correction, temperature=1.0, scale=9, log_prob_budget=60)
        made.old_log_probs = made.rollout_log_probs
        figures = actor.update(made, balance_in_order(made, 2), guards())
        assert backend.extra_state()["steps_taken"]["optimizer_step"] == 2
    assert figures["actor/empty_mini_batches"] == 0.5
    assert actor.entropy_control.state_dict()["coefficient"] == pytest.approx(0.4)


@pytest.mark.parametrize("in_mask", [False, True])
def test_metrics_leave_out_an_optimizer_step_without_tokens(in_mask: bool) -> None:
    """Means over no tokens would be 0. With `in_mask`, only the loss has no tokens, but the policy has some."""
    made, _ = filled("gae", True)
    config = ActorConfig(ppo_max_token_len_per_gpu=60, optim=OPTIM, calculate_entropy=True)
    made.loss_mask = made.response_mask.clone()
    (made.loss_mask if in_mask else made.response_mask)[6:] = 0
    made.loss_mask *= made.response_mask

    def metrics(batch: EveryBatch, mini_batches: int) -> dict[str, float]:
        with single_rank():
            backend = engine(tiny_qwen2(), config, BackendConfig())
            actor = Actor(backend, config, RolloutCorrectionConfig(), temperature=1.0, scale=9, log_prob_budget=60)
            batch.old_log_probs = batch.rollout_log_probs
            return actor.update(batch, balance_in_order(batch, mini_batches), guards())

    both, first = metrics(made, 2), metrics(made.select(slice(0, 6)), 1)
    of_steps = {"actor/grad_norm", "actor/lr", "actor/empty_mini_batches"}
    same = {"actor/loss", "actor/pg_loss"} if in_mask else first.keys() - of_steps
    assert {name: both[name] for name in same} == pytest.approx({name: first[name] for name in same}, rel=1e-6)
    assert both["actor/empty_mini_batches"] == 0.5
    assert both["actor/entropy"] > 0.7 * first["actor/entropy"]


def test_the_largest_difference_is_the_largest_of_all_mini_batches() -> None:
    made, _ = filled("gae", True)
    config = ActorConfig(ppo_max_token_len_per_gpu=60, optim=OPTIM)
    with single_rank():
        backend = engine(tiny_qwen2(), config, BackendConfig())
        actor = Actor(backend, config, RolloutCorrectionConfig(), temperature=1.0, scale=9, log_prob_budget=60)
        made.old_log_probs = made.rollout_log_probs + 0.1
        made.old_log_probs[-1, 0] += 3
        figures = actor.update(made, balance_in_order(made, 2), guards())
    assert figures["rollout/logprob_diff_max"] == pytest.approx(3.1)


def test_only_responses_that_the_limit_cut_off_are_truncated() -> None:
    """A response whose end-of-sequence token is at the limit is complete."""
    samples = [Sample.of(7, 0, [3, 4, 1], [-1.0] * 3, "stop"), Sample.of(7, 1, [3, 4, 5], [-1.0] * 3, "length")]
    group = Group(7, [2, 2], samples, [RewardResult(1.0, {"f": 1.0}), RewardResult(0.0, {"f": 0.0})], [0.0, 0.0], None)
    made = collate([group], 0, 0, torch.device("cpu"))
    assert made.truncated is not None
    assert made.truncated.tolist() == [False, True]
