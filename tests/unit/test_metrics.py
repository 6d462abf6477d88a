"""Metrics of a step: the parts of ranks add up to the direct computation over all samples."""

import math
import random
import statistics
from functools import reduce
from operator import add

import pytest
import torch

from rlhf.batch import RolloutBatch, TokenCounts
from rlhf.experience.collate import collate
from rlhf.experience.groups import Group
from rlhf.experience.metrics import Summary, merge, slowest, step_metrics
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.gloo import GlooTransport
from rlhf.reward import RewardResult
from rlhf.rollout import Sample
from tests.support.rounding import sum_bound


def variance_error(values):
    """Return a bound of the rounding error of mean(x ** 2) - mean(x) ** 2 over `values`."""
    return sum_bound(4 * len(values) + 4, torch.float64) * statistics.fmean(v * v for v in values)


@pytest.mark.parametrize("seed", range(10))
def test_parts_add_up(seed):
    rng = random.Random(seed)
    parts = [[rng.gauss(3, 2) for _ in range(rng.choice([0, 1, 5, 50]))] for _ in range(rng.randint(1, 6))] + [[1.0]]
    rng.shuffle(parts)
    values = [value for part in parts for value in part]
    summary = reduce(add, (Summary.of(part) for part in parts))
    assert (summary.count, summary.low, summary.high) == (len(values), min(values), max(values))
    error = sum_bound(len(values) + 1, torch.float64) * statistics.fmean(map(abs, values))
    assert summary.mean == pytest.approx(statistics.fmean(values), rel=0, abs=error)
    assert summary.std**2 == pytest.approx(statistics.pvariance(values), rel=0, abs=variance_error(values))


def test_equal_values_have_no_spread():
    for value in (0.0, 0.1, 1.0, 1e8 + 0.1):
        assert Summary.of([value] * 7).std ** 2 <= variance_error([value] * 7)


def test_an_empty_part_adds_nothing_and_is_left_out():
    full, empty = Summary.of([2.0, -1.0]), Summary.of(())
    assert full + empty == empty + full == full
    assert merge({"b": full, "empty": empty, "a": full}, Coordinator(GlooTransport())) == {"a": full, "b": full}
    assert list(merge({"b": full, "a": full}, Coordinator(GlooTransport()))) == ["a", "b"]


def test_step_metrics():
    scores, prompts, responses = [1.0, 0.0, 0.5, 0.0], [3, 3, 5, 5], [4, 8, 2, 8]
    batch = RolloutBatch(
        input_ids=torch.zeros(4, 13, dtype=torch.int64),
        prompt_lengths=torch.tensor(prompts),
        response_lengths=torch.tensor(responses),
        response_mask=torch.ones(4, 8, dtype=torch.bool),
        rollout_log_probs=torch.zeros(4, 8),
        uids=torch.tensor([0, 0, 1, 1]),
        numbers=torch.tensor([0, 1, 0, 1]),
        scores=torch.tensor(scores),
        truncated=torch.zeros(4, dtype=torch.bool),
    )
    extras = [{"format": 1.0}, {"format": 0.0, "rare": 7.0}, {"format": 1.0}, {}]
    # The batch's scores include the over-long punishment; the results' scores do not.
    results = [RewardResult(s + 1, {"maths": s, "style": 2 * s + 1}, e) for s, e in zip(scores, extras, strict=True)]
    reasons = ["stop", "length", "stop", "length"]
    observations = [((1, 3),), (), (), ((0, 1), (4, 8))]  # what a tool wrote is part of a response's length
    samples = [
        Sample.of(0, 0, [1] * n, [0.0] * n, reason, 0, spans)
        for n, reason, spans in zip(responses, reasons, observations, strict=True)
    ]
    groups = [
        Group(0, [1] * 3, samples[:2], results[:2], [0.0, 0.0], None),
        Group(1, [1] * 5, samples[2:], results[2:], [-0.5, 0.0], None),  # penalties make scores equal
    ]
    metrics, tokens = step_metrics(batch, groups, 8, Coordinator(GlooTransport()), windows={10})
    squares = 7**2 + 11**2 + 7**2 + 13**2
    assert tokens == TokenCounts(sum(prompts) + sum(responses), sum(responses) - 7, squares, {10: 1**2 + 3**2})
    assert metrics == pytest.approx(
        {
            "reward/mean": 1.5 / 4,
            "reward/min": 0,
            "reward/max": 1,
            "reward/frac_zero_std": 0.5,
            "reward/std": math.sqrt((1 + 0.25) / 4 - (1.5 / 4) ** 2),
            "reward/maths": 1.5 / 4,
            "reward/style": 7 / 4,
            "reward/format": 2 / 3,
            "reward/rare": 7,
            "response_length/mean": 5.5,
            "response_length/min": 2,
            "response_length/max": 8,
            "response_length/clip_ratio": 0.5,
            "response_length_terminated/mean": 3,
            "response_length_terminated/min": 2,
            "response_length_terminated/max": 4,
            "prompt_length/mean": 4,
            "prompt_length/min": 3,
            "prompt_length/max": 5,
        }
    )


def test_metrics_without_any_sample_are_left_out():
    sample = Sample.of(0, 0, [1, 1], [0.0, 0.0], "length", 0)
    group = Group(0, [1, 1], [sample], [RewardResult(1.0, {"maths": 1.0})], [0.0], None)
    batch = collate([group], 0, 0, torch.device("cpu"))
    metrics, _ = step_metrics(batch, [group], 2, Coordinator(GlooTransport()))
    assert metrics["response_length/clip_ratio"] == 1
    assert not any(name.startswith("response_length_terminated") for name in metrics)
    assert "reward/frac_zero_std" not in metrics, "a group of one sample does not count"


def test_the_slowest_rank_is_named_with_its_distance_to_the_median():
    assert slowest([2.0, 1.0, 5.0]) == {"perf/slowest_rank": 2, "perf/slowest_rank_ratio": 2.5}
    assert slowest([6.0, 2.0]) == {"perf/slowest_rank": 0, "perf/slowest_rank_ratio": 3.0}
    assert slowest([4.0]) == {}
    assert slowest([0.0, 0.0]) == {}
