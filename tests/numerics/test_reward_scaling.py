"""Compares normalised and clipped rewards with loops over floats, over batches, ranks and resumes.

`RewardScaling` computes in float64 and rounds its results once to float32.
"""

import json
import statistics

import pytest
import torch
import torch.distributed as dist

from rlhf.config import AlgorithmConfig, GuardsConfig
from rlhf.learning.guards import Guards
from rlhf.learning.reward_scaling import RewardScaling
from tests.support.numeric_ranks import run_ranks, single_rank
from tests.support.rounding import FLOAT32
from tests.support.tables import close
from tests.support.tiny_updates import EveryBatch, random_batch

BATCHES = [[1.0, 0.0, 0.25, 3.0], [5.0, 5.0], [-2.0, 0.5, 0.125, 1.0, 1.5, 9.0], [1e6, 1e6 + 1, 1e6 + 2]]
RANGE = [-0.5, 1.0]


def batch_of(scores: list[float], baselines: list[float] | None = None) -> EveryBatch:
    batch = random_batch(seed=0, samples=len(scores))
    batch.scores = torch.tensor(scores)
    batch.baselines = None if baselines is None else torch.tensor(baselines)
    return batch


def guards(reward: float = 0.0) -> Guards:
    judge = Guards(GuardsConfig())
    judge.begin(1, reward)
    return judge


def expected(batches: list[list[float]], kind: str | None, bounds: list[float] | None) -> list[list[float]]:
    """Return the scaled scores of each batch, with mean and variance from the `statistics` module."""
    result, so_far = [], []
    for scores in batches:
        so_far += scores
        of = {"batch": scores, "running": so_far, None: [0.0]}[kind]
        variance = statistics.variance(of) + 1e-8 if kind else 1.0
        scaled = [(s - statistics.fmean(of)) / variance**0.5 for s in scores]
        result.append([min(max(s, bounds[0]), bounds[1]) for s in scaled] if bounds else scaled)
    return result


@pytest.mark.parametrize("bounds", [None, RANGE])
@pytest.mark.parametrize("kind", [None, "batch", "running"])
def test_scores_of_successive_batches(kind, bounds):
    config = AlgorithmConfig(normalize_reward=kind, reward_clip_range=bounds)
    scaling = RewardScaling(config)
    with single_rank():
        every = (BATCHES, expected(BATCHES, kind, None), expected(BATCHES, kind, bounds))
        for scores, unclipped, wanted in zip(*every, strict=True):
            # Save and load the state as JSON, like a checkpoint, before each batch.
            resumed = RewardScaling(config)
            resumed.load_state_dict(json.loads(json.dumps(scaling.state_dict())))
            found, _, figures = scaling.apply(batch_of(scores), guards())
            close(found, wanted, tolerance=FLOAT32)
            assert torch.equal(resumed.apply(batch_of(scores), guards())[0], found)
            assert resumed.state_dict() == scaling.state_dict()
            share = sum(u != w for u, w in zip(unclipped, wanted, strict=True)) / len(wanted) if bounds else None
            assert figures.get("reward/clip_frac") == share
    assert scaling.remembers == (kind == "running")
    assert (scaling.state_dict()["count"] > 0) == scaling.remembers


def test_scores_are_unchanged_by_default():
    batch = batch_of([0.1, -1e30, 3e-39], [0.3, 0.7, 1e-40])
    scores, baselines, figures = RewardScaling(AlgorithmConfig()).apply(batch, guards())
    assert torch.equal(scores, batch.scores)
    assert torch.equal(baselines, batch.baselines)
    assert figures == {}


def test_baselines_are_scaled_like_scores():
    with single_rank():
        scaling = RewardScaling(AlgorithmConfig(normalize_reward="batch", reward_clip_range=[-1.0, 1.0]))
        scores, baselines, _ = scaling.apply(batch_of([1.0, 2.0, 9.0], [1.0, 9.0, 2.0]), guards())
    assert torch.equal(baselines, scores[[0, 2, 1]])


def test_rejected_rewards_do_not_change_the_running_statistics():
    scaling = RewardScaling(AlgorithmConfig(normalize_reward="running"))
    with single_rank():
        scaling.apply(batch_of([1.0, 2.0]), guards())
        before = scaling.state_dict()
        scaling.apply(batch_of([float("nan"), 2.0]), guards(float("nan")))
    assert scaling.state_dict() == before


def on_this_rank() -> dict[str, list[torch.Tensor]]:
    """Scale this rank's scores: rank 0 has all but each batch's last score, and the whole second batch. Collective."""
    found: dict[str, list[torch.Tensor]] = {}
    for kind in ("batch", "running"):
        scaling = RewardScaling(AlgorithmConfig(normalize_reward=kind, reward_clip_range=RANGE))
        for number, scores in enumerate(BATCHES[:3]):
            cut = len(scores) - (number != 1)
            mine = scores[:cut] if dist.get_rank() == 0 else scores[cut:]
            batch = batch_of(scores).select(torch.arange(len(mine)))
            batch.scores = torch.tensor(mine)
            found.setdefault(kind, []).append(scaling.apply(batch, guards())[0])
    return found


def test_a_split_over_ranks_equals_the_whole():
    first, second = run_ranks(2, on_this_rank)
    for kind in ("batch", "running"):
        for one, other, wanted in zip(first[kind], second[kind], expected(BATCHES[:3], kind, RANGE), strict=True):
            close(torch.cat([one, other]), wanted, tolerance=FLOAT32)
