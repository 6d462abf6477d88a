"""Compares every estimator with loops over floats, for any mask, padding, float type and number of ranks."""

import math
import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import comb

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlhf.algorithms import advantages
from rlhf.algorithms.advantages import EstimatorInput
from rlhf.algorithms.statistics import masked_whiten
from rlhf.config import AlgorithmConfig
from rlhf.ranks.collectives import all_sum
from tests.support import float_reference as reference
from tests.support.numeric_ranks import run_ranks
from tests.support.rounding import FLOAT32, sum_bound
from tests.support.tables import Rows, close, random_mask, random_table, tensor

ESTIMATORS = ("gae", "grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax")
WHITENED = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
CONFIGS = (
    AlgorithmConfig(),
    AlgorithmConfig(gamma=0.9, lam=0.7, norm_adv_by_std_in_grpo=False),
    AlgorithmConfig(gamma=0.95, lam=0.0),
)


@dataclass
class Case:
    rewards: Rows
    values: Rows
    mask: Rows
    baselines: list[float]
    group_size: int

    def inputs(self, dtype: torch.dtype = torch.float64) -> EstimatorInput:
        """Return the estimator's input, with NaN outside the mask."""
        return EstimatorInput(
            tensor(self.rewards, self.mask).to(dtype),
            torch.tensor(self.mask),
            self.group_size,
            tensor(self.values, self.mask).to(dtype),
            torch.tensor(self.baselines, dtype=dtype),
        )

    def expected(self, name: str, config: AlgorithmConfig) -> Rows:
        rewards, mask, n = self.rewards, self.mask, self.group_size
        if name == "gae":
            rows = reference.whiten(reference.gae(rewards, self.values, mask, config.gamma, config.lam)[0])
        elif name == "grpo":
            norm = config.norm_adv_by_std_in_grpo
            rows = reference.by_group(rewards, mask, n, lambda group: reference.grpo(group, norm))
        elif name == "rloo":
            rows = reference.by_group(rewards, mask, n, reference.rloo)
        elif name == "reinforce_plus_plus":
            rows = reference.whiten(reference.rewards_to_go(rewards, mask, config.gamma))
        elif name == "reinforce_plus_plus_baseline":
            rows = reference.whiten(reference.by_group(rewards, mask, n, reference.subtract_group_mean))
        else:
            togo = reference.rewards_to_go(rewards, mask, 1.0)
            rows = [[value - b for value in row] for row, b in zip(togo, self.baselines, strict=True)]
        return reference.on_tokens(rows, mask)


def cases(group_size: int, count: int = 12) -> Iterator[Case]:
    rng = random.Random(group_size)
    for _ in range(count):
        rows, columns = group_size * rng.randint(1, 4), rng.randint(1, 20)
        yield Case(
            random_table(rng, rows, columns, rng.choice([0.1, 3.0])),
            random_table(rng, rows, columns, 1.0),
            random_mask(rng, rows, columns),
            [rng.gauss(0, 1) for _ in range(rows)],
            group_size,
        )


def estimate(name: str, inputs: EstimatorInput, config: AlgorithmConfig) -> advantages.Estimate:
    return getattr(advantages, name)(inputs, config)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("group_size", [1, 2, 5])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_equals_the_reference(name, group_size, config):
    signs = set()
    for case in cases(group_size):
        ours = estimate(name, case.inputs(), config).advantages
        close(ours, case.expected(name, config), tolerance=1e-10)
        assert not ours[torch.tensor(case.mask) == 0].any()
        signs |= set(ours.sign().flatten().tolist())
    assert {1.0, -1.0} <= signs


@pytest.mark.parametrize("config", CONFIGS)
def test_gae_returns_are_taken_before_whitening(config):
    for case in cases(group_size=1):
        returns = estimate("gae", case.inputs(), config).returns
        expected = reference.gae(case.rewards, case.values, case.mask, config.gamma, config.lam)[1]
        close(returns, reference.on_tokens(expected, case.mask), tolerance=1e-10)


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name != "gae"])
def test_only_gae_returns_targets_for_the_critic(name):
    assert estimate(name, next(cases(2)).inputs(), AlgorithmConfig()).returns is None


@pytest.mark.parametrize("name", ESTIMATORS)
def test_padding_changes_nothing(name):
    for case in cases(group_size=2):
        inputs = case.inputs()

        def wider(x: Tensor, filler: float) -> Tensor:
            return torch.nn.functional.pad(x, (0, 7), value=filler)

        padded = replace(
            inputs,
            token_rewards=wider(inputs.token_rewards, torch.nan),
            mask=wider(inputs.mask, 0),
            values=wider(inputs.values, torch.inf),
        )
        one, other = estimate(name, inputs, CONFIGS[1]), estimate(name, padded, CONFIGS[1])
        for narrow, wide in zip(one, other, strict=True):
            if narrow is not None:
                torch.testing.assert_close(wide[:, :-7], narrow, rtol=1e-12, atol=1e-12)
                assert not wide[:, -7:].any()


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("mask_type", [torch.float32, torch.bool, torch.int64])
def test_float32_in_and_out_with_any_type_of_mask(name, mask_type):
    for case in cases(group_size=3):
        inputs = case.inputs(torch.float32)
        rounded = replace(
            case,
            rewards=inputs.token_rewards.nan_to_num().tolist(),
            values=inputs.values.nan_to_num().tolist(),
            baselines=inputs.baselines.tolist(),
        )
        for ours in estimate(name, replace(inputs, mask=inputs.mask.to(mask_type)), CONFIGS[1]):
            assert ours is None or ours.dtype == torch.float32
        ours = estimate(name, replace(inputs, mask=inputs.mask.to(mask_type)), CONFIGS[1]).advantages
        close(ours, rounded.expected(name, CONFIGS[1]), FLOAT32)


@pytest.mark.parametrize("norm_by_std", [True, False])
@pytest.mark.parametrize("score", [0.0, 1.0, 0.1, -2.7])
def test_grpo_of_equal_rewards_is_exactly_zero(score, norm_by_std):
    config = AlgorithmConfig(norm_adv_by_std_in_grpo=norm_by_std)
    for group_size in (2, 3, 7, 8, 16):
        inputs = EstimatorInput(torch.full((2 * group_size, 1), score), torch.ones(2 * group_size, 1), group_size)
        assert not estimate("grpo", inputs, config).advantages.any()


@pytest.mark.parametrize("norm_by_std", [True, False])
@pytest.mark.parametrize(("group_size", "k"), [(2, 1), (5, 1), (5, 2), (6, 3), (5, 4), (5, 5)])
def test_pass_at_k_equals_the_mean_over_all_k_subsets(group_size, k, norm_by_std):
    config, rng = AlgorithmConfig(pass_at_k=k, norm_adv_by_std_in_grpo=norm_by_std), random.Random(0)
    found = set()
    for case in cases(group_size):
        # Make ties frequent, as they are among scores of verifiers.
        case.rewards = [[rng.choice([value, 0.5, 0.5]) for value in row] for row in case.rewards]
        ours = estimate("pass_at_k", case.inputs(), config).advantages
        rows = reference.by_group(
            case.rewards, case.mask, group_size, lambda group: reference.pass_at_k(group, k, norm_by_std)
        )
        close(ours, reference.on_tokens(rows, case.mask), tolerance=1e-10)
        found |= set(ours.sign().flatten().tolist())
    assert found == ({0.0} if group_size == k else {-1.0, 0.0, 1.0})


@pytest.mark.parametrize(("right", "k"), [(1, 2), (3, 4), (5, 3), (8, 2), (0, 3), (7, 2)])
def test_pass_at_k_of_binary_scores_is_the_closed_form_of_the_paper(right, k):
    n = 8
    scores = torch.tensor([[1.0]] * right + [[0.0]] * (n - right), dtype=torch.float64)
    ours = estimate("pass_at_k", EstimatorInput(scores, torch.ones(n, 1), n), AlgorithmConfig(pass_at_k=k)).advantages
    mean = 1 - comb(n - right, k) / comb(n, k)
    deviation = math.sqrt(mean * (1 - mean)) + 1e-6
    of_right = (1 - mean) / deviation
    of_wrong = (1 - mean - comb(n - right - 1, k - 1) / comb(n - 1, k - 1)) / deviation if right < n else 0.0
    close(ours, [[of_right]] * right + [[of_wrong]] * (n - right), tolerance=1e-12)
    if right == 0 or n - right < k:
        assert not ours.any(), "must be exactly 0, else the division would enlarge rounding errors"


def test_a_group_of_one_keeps_its_score():
    scores = torch.tensor([[2.0], [-0.5], [0.0]])
    inputs = EstimatorInput(scores, torch.ones(3, 1), 1)
    assert torch.equal(estimate("rloo", inputs, AlgorithmConfig()).advantages, scores)
    assert torch.equal(estimate("grpo", inputs, AlgorithmConfig(norm_adv_by_std_in_grpo=False)).advantages, scores)
    close(estimate("grpo", inputs, AlgorithmConfig()).advantages, [[2 / (1 + 1e-6)], [-0.5 / (1 + 1e-6)], [0.0]])


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("tokens", [0, 1])
def test_masks_with_one_token_or_none_give_finite_advantages(name, tokens):
    mask = torch.zeros(2, 3)
    mask[0, :tokens] = 1
    inputs = EstimatorInput(mask * 0.7, mask, 1, torch.full((2, 3), 0.2), torch.full((2,), 0.5))
    for ours in estimate(name, inputs, AlgorithmConfig()):
        assert ours is None or ours.isfinite().all()
    if name in WHITENED or tokens == 0:
        assert not estimate(name, inputs, AlgorithmConfig()).advantages.any()


def test_whitening_is_precise_for_small_differences_around_a_large_mean():
    values = [[1e6 + 0.1 * i for i in range(5)], [1e6 - 0.3] * 5]
    ours = masked_whiten(tensor(values), torch.ones(2, 5), advantages.only_rank)
    close(ours, reference.whiten(values))
    # Whitening divides by sqrt(var + 1e-8). Each value is off by half a unit in the last place of 1e6. The
    # mean is off by at most one such unit for each of its ten terms.
    variance = statistics.variance(value for row in values for value in row)
    rounding = 1e6 * sum_bound(10 + 1, torch.float64) / variance**0.5
    assert ours.std() == pytest.approx(1, abs=1e-8 / (2 * variance) + 2 * rounding)


SPLIT = next(case for case in cases(group_size=2, count=50) if len(case.mask) == 8 and len(case.mask[0]) > 5)


def on_this_rank() -> dict[str, Tensor]:
    """Estimate this rank's part: rank 0 has the first three groups, rank 1 the last."""
    rows = slice(0, 6) if dist.get_rank() == 0 else slice(6, 8)
    mine = Case(*(getattr(SPLIT, f)[rows] for f in ("rewards", "values", "mask", "baselines")), SPLIT.group_size)
    inputs = replace(mine.inputs(), all_sum=all_sum)
    return {name: estimate(name, inputs, CONFIGS[1]).advantages for name in ESTIMATORS}


def test_a_split_over_ranks_equals_the_whole():
    assert any(any(row) for row in SPLIT.mask[6:]), "both ranks must have tokens"
    first, second = run_ranks(2, on_this_rank)
    for name in ESTIMATORS:
        close(torch.cat([first[name], second[name]]), SPLIT.expected(name, CONFIGS[1]))
