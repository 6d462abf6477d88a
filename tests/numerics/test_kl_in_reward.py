"""Tests the KL in the reward: the penalty of each token, the adaptive coefficient, and results on several ranks."""

import math
import statistics
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlhf.config import AlgorithmConfig, GuardsConfig, KlCtrlConfig
from rlhf.learning.credit import Advantages
from rlhf.learning.guards import Guards
from tests.support.in_float64 import TOLERANCE, in_float64
from tests.support.numeric_ranks import run_ranks
from tests.support.tiny_updates import EveryBatch, fill, random_batch

SAMPLES, GROUP, BETA, TARGET, HORIZON = 12, 3, 0.3, 0.5, 40


def whole_batch(seed: int = 4) -> EveryBatch:
    batch = random_batch(seed=seed, samples=SAMPLES)
    generator = torch.Generator().manual_seed(seed)
    old, ref = (torch.randn(batch.rollout_log_probs.shape, generator=generator) for _ in range(2))
    values = torch.randn(batch.rollout_log_probs.shape, generator=generator) * batch.response_mask
    # Large values in the padding would change the results if they were read.
    outside = ~batch.response_mask
    return replace(
        batch,
        old_log_probs=old.masked_fill(outside, 50.0),
        ref_log_probs=ref.masked_fill(outside, -50.0),
        values=values,
    )


def guards() -> Guards:
    every = Guards(GuardsConfig())
    every.begin(1, 0.0)
    return every


def filled(estimator: str, kind: str = "adaptive") -> dict[str, Any]:
    """Estimate the advantages of two successive batches. Each rank has part of the groups. Collective."""
    control = KlCtrlConfig(kind, BETA, TARGET, HORIZON)
    config = AlgorithmConfig(estimator, gamma=0.9, lam=0.8, use_kl_in_reward=True, kl_penalty="k2", kl_ctrl=control)
    advantages = Advantages(config, GROUP)
    results = []
    for seed in (4, 5):
        rows = torch.arange(SAMPLES).chunk(dist.get_world_size())[dist.get_rank()]
        batch = whole_batch(seed).select(rows)
        figures = fill(advantages, batch, guards())
        rewards = torch.zeros(len(batch), whole_batch(seed).rollout_log_probs.shape[1])
        rewards[:, : batch.token_rewards.shape[1]] = batch.token_rewards
        estimated = batch.advantages[batch.response_mask].tolist()
        result = {"figures": figures, "token_rewards": rewards, "coef": advantages.kl_coef, "advantages": estimated}
        results.append(result)
    return {"results": results, "state": advantages.state_dict()}


@in_float64()
def adaptive_gae() -> dict[str, Any]:
    return filled("gae")


@in_float64()
def fixed_grpo() -> dict[str, Any]:
    return filled("grpo", "fixed")


def by_hand(batch: EveryBatch, beta: float) -> tuple[list[list[float]], float]:
    """Return the token rewards, and the mean over sequences of the mean KL per token."""
    rows, means = [], []
    for s in range(SAMPLES):
        length = int(batch.response_lengths[s])
        kls = [float(batch.old_log_probs[s, t] - batch.ref_log_probs[s, t]) ** 2 / 2 for t in range(length)]
        rewards = [-beta * kl for kl in kls]
        rewards[-1] += float(batch.scores[s])
        rows.append(rewards)
        means.append(sum(kls) / length)
    return rows, sum(means) / SAMPLES


@pytest.mark.parametrize("world_size", [1, 2])
@in_float64()
def test_penalty_and_adaptive_coefficient(world_size):
    ranks = run_ranks(world_size, adaptive_gae)
    beta = BETA
    for number, seed in enumerate((4, 5)):
        rows, mean = by_hand(whole_batch(seed), beta)
        rewards: Tensor = torch.cat([rank["results"][number]["token_rewards"] for rank in ranks])
        for s, row in enumerate(rows):
            torch.testing.assert_close(rewards[s, : len(row)].tolist(), row, rtol=TOLERANCE, atol=TOLERANCE)
            assert not rewards[s, len(row) :].any()
        for rank in ranks:
            figures = rank["results"][number]["figures"]
            assert math.isclose(figures["reward/kl"], mean, rel_tol=TOLERANCE)
            # The rewards used the coefficient before its update.
            assert math.isclose(figures["reward/kl_coef"], beta, rel_tol=TOLERANCE)
        beta *= 1 + max(-0.2, min(0.2, mean / TARGET - 1)) * SAMPLES / HORIZON
        assert beta != BETA
        for rank in ranks:
            assert math.isclose(rank["results"][number]["coef"], beta, rel_tol=TOLERANCE)
    assert all(math.isclose(rank["state"]["kl_coef"], beta, rel_tol=TOLERANCE) for rank in ranks)


@pytest.mark.parametrize("world_size", [1, 2])
def test_advantage_metrics_count_every_token_of_all_ranks(world_size):
    ranks = run_ranks(world_size, fixed_grpo)
    for number in range(2):
        every = [value for rank in ranks for value in rank["results"][number]["advantages"]]
        expected = {
            "mean": statistics.fmean(every),
            "std": statistics.pstdev(every),
            "min": min(every),
            "max": max(every),
        }
        assert expected["min"] < 0 < expected["max"]
        for rank in ranks:
            figures = rank["results"][number]["figures"]
            found = {name: figures[f"advantages/{name}"] for name in expected}
            assert found == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE)


def test_a_fixed_coefficient_does_not_change():
    (rank,) = run_ranks(1, fixed_grpo)
    assert [result["coef"] for result in rank["results"]] == [BETA, BETA]


def with_nan_kl() -> list[float]:
    config = AlgorithmConfig("grpo", use_kl_in_reward=True, kl_ctrl=KlCtrlConfig("adaptive", BETA, TARGET, HORIZON))
    advantages, batch, watch = Advantages(config, GROUP), whole_batch(), guards()
    batch.old_log_probs[0, 0] = math.nan
    fill(advantages, batch, watch)
    assert watch.rejected is not None
    return [advantages.kl_coef]


def test_a_kl_that_is_not_finite_is_rejected_and_does_not_change_the_coefficient():
    assert run_ranks(1, with_nan_kl) == [[BETA]]
