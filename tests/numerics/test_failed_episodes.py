"""Failed samples and observation spans in the advantages, against loops over Python floats."""

import random
import statistics
from dataclasses import replace

import pytest
import torch

from rlhf.algorithms.advantages import EstimatorInput
from rlhf.algorithms.lookup import load_estimator
from rlhf.config import AlgorithmConfig
from rlhf.learning.credit import scores_on_last_tokens

GROUPS, SIZE, COLUMNS = 5, 4, 12
FAILED = ([], [1], [0, 3], [0, 1, 2], [0, 1, 2, 3])
"""Failed samples of each group."""


def case() -> tuple[list[float], EstimatorInput]:
    """Return the scores, and the input with observation spans in the middle of the responses."""
    rng = random.Random(4)
    scores = [rng.gauss(0, 1) for _ in range(GROUPS * SIZE)]
    mask = torch.zeros(GROUPS * SIZE, COLUMNS, dtype=torch.bool)
    failed = torch.zeros(GROUPS * SIZE, dtype=torch.bool)
    for row in range(GROUPS * SIZE):
        if row % SIZE in FAILED[row // SIZE]:
            failed[row] = True
            continue
        length, start = rng.randint(6, COLUMNS), rng.randint(1, 3)
        mask[row, :length] = True
        mask[row, start : start + rng.randint(1, 2)] = False
    rewards = scores_on_last_tokens(torch.tensor(scores, dtype=torch.float64), mask)
    return scores, EstimatorInput(rewards, mask.double(), SIZE, failed=failed)


def expected(name: str, scores: list[float]) -> list[float]:
    """Return each response's advantage among the responses of its group that did not fail."""
    found = []
    for group in range(GROUPS):
        own = scores[group * SIZE : (group + 1) * SIZE]
        left = [score for i, score in enumerate(own) if i not in FAILED[group]]
        for i, score in enumerate(own):
            if i in FAILED[group] or len(left) < 2:
                found.append(0.0)
            elif name == "grpo":
                found.append((score - statistics.fmean(left)) / (statistics.stdev(left) + 1e-6))
            else:
                others = (sum(left) - score) / (len(left) - 1)
                found.append(score - others)
    return found


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_failed_samples_are_in_no_group(name):
    scores, inputs = case()
    found = load_estimator(name)(inputs, AlgorithmConfig(adv_estimator=name)).advantages
    wanted = torch.tensor(expected(name, scores), dtype=torch.float64)[:, None] * inputs.mask
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    # If failed samples had a score of 0, like responses without reward, the advantages would differ.
    assert not torch.allclose(load_estimator(name)(replace(inputs, failed=None), AlgorithmConfig()).advantages, wanted)


def test_gae_goes_over_observations_to_the_next_token_of_the_policy():
    scores, inputs = case()
    gamma, lam = 0.9, 0.8
    values = torch.randn(inputs.mask.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    config = AlgorithmConfig(adv_estimator="gae", gamma=gamma, lam=lam)
    found = load_estimator("gae")(replace(inputs, values=values), config).returns
    assert found is not None
    wanted = torch.zeros_like(values)
    for row in range(len(scores)):
        own = [t for t in range(COLUMNS) if inputs.mask[row, t]]
        advantage = next_value = 0.0
        for t in reversed(own):
            reward = scores[row] if t == own[-1] else 0.0
            delta = reward + gamma * next_value - float(values[row, t])
            advantage = delta + gamma * lam * advantage
            next_value = float(values[row, t])
            wanted[row, t] = advantage + next_value
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
