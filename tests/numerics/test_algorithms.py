"""Advantages, losses, KL and aggregation against loops over floats, values and gradients."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rlhf.algorithms.advantages import grpo
from rlhf.algorithms.aggregation import loss_count, loss_sum
from rlhf.algorithms.kl import kl_estimate
from rlhf.algorithms.losses import clipped_policy_loss
from tests.numerics import reference

MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")
TOLERANCE = {"rtol": 1e-6, "atol": 1e-6}
CASES = 25


def close(ours: Tensor, expected: object) -> None:
    torch.testing.assert_close(ours, torch.as_tensor(expected, dtype=ours.dtype), **TOLERANCE)


def random_table(rng: random.Random, rows: int, columns: int, scale: float) -> list[list[float]]:
    return [[rng.gauss(0, scale) for _ in range(columns)] for _ in range(rows)]


def random_mask(rng: random.Random, rows: int, columns: int) -> list[list[float]]:
    """Responses of random lengths; at least one row has tokens and, when there are several, one has none."""
    lengths = [rng.randint(0, columns) for _ in range(rows)]
    if rows > 1:
        lengths[rng.randrange(1, rows)] = 0
    lengths[0] = max(1, lengths[0])
    return [[float(column < length) for column in range(columns)] for length in lengths]


def slopes(function: Callable[[list[list[float]]], float], at: list[list[float]]) -> list[list[float]]:
    """The gradient by central differences."""
    step = 1e-6
    result = [[0.0] * len(row) for row in at]
    for i, row in enumerate(at):
        for j, value in enumerate(row):
            row[j] = value + step
            above = function(at)
            row[j] = value - step
            result[i][j] = (above - function(at)) / (2 * step)
            row[j] = value
    return result


@pytest.mark.parametrize("norm_by_std", [True, False])
@pytest.mark.parametrize("group_size", [1, 2, 5, 8])
def test_grpo(group_size, norm_by_std):
    rng = random.Random(group_size)
    for groups in (1, 3, 7):
        scores = [rng.choice([0.0, 1.0, rng.gauss(0, 3)]) for _ in range(groups * group_size)]
        ours = grpo(torch.tensor(scores, dtype=torch.float64), group_size, norm_by_std=norm_by_std)
        close(ours, reference.grpo_advantages(scores, group_size, norm_by_std))


@pytest.mark.parametrize("norm_by_std", [True, False])
@pytest.mark.parametrize("score", [0.0, 1.0, 0.1, -2.7])
def test_grpo_of_equal_rewards_is_exactly_zero(score, norm_by_std):
    for group_size in (2, 3, 7, 8, 16):
        assert not grpo(torch.full((2 * group_size,), score), group_size, norm_by_std=norm_by_std).any()


def test_grpo_of_a_group_of_one_is_the_score():
    scores = torch.tensor([2.0, -0.5, 0.0])
    assert torch.equal(grpo(scores, 1, norm_by_std=False), scores)
    close(grpo(scores, 1), [2 / (1 + 1e-6), -0.5 / (1 + 1e-6), 0.0])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.2, 0.28), (0.05, 0.5)])
def test_clipped_policy_loss_and_its_gradient(mode, low, high):
    rng = random.Random(0)
    clipped_tokens = {True: 0, False: 0}
    for _ in range(CASES):
        rows, columns = rng.randint(1, 4), rng.randint(1, 5)
        old, mask = random_table(rng, rows, columns, 1.0), random_mask(rng, rows, columns)
        new = [[o + rng.gauss(0, 0.4) for o in row] for row in old]
        advantages = [rng.gauss(0, 1) for _ in range(rows)]

        def tokens(new, old=old, advantages=advantages):
            return [
                [reference.policy_loss(n, o, a, low, high) for n, o in zip(ns, os, strict=True)]
                for ns, os, a in zip(new, old, advantages, strict=True)
            ]

        def value(new, mask=mask, tokens=tokens):
            return reference.aggregate([[t[0] for t in row] for row in tokens(new)], mask, mode)

        x = torch.tensor(new, dtype=torch.float64, requires_grad=True)
        a, m = torch.tensor(advantages, dtype=torch.float64)[:, None], torch.tensor(mask)
        losses, clipped = clipped_policy_loss(x, torch.tensor(old, dtype=torch.float64), a, low, high)
        ours = loss_sum(losses, m, mode) / loss_count(m, mode)
        ours.backward()
        close(ours.detach(), value(new))
        close(x.grad, slopes(value, new))
        close(clipped, [[t[1] for t in row] for row in tokens(new)])
        for advantage, row in zip(advantages, clipped, strict=True):
            clipped_tokens[advantage > 0] += int(row.sum())
    assert all(clipped_tokens.values()), "clipping must have happened for both signs of the advantage"


@pytest.mark.parametrize("advantage", [1.5, -1.5])
@pytest.mark.parametrize("difference", [19.0, 25.0, 1000.0, -19.0, -25.0, -1000.0])
def test_ratio_is_bounded(difference, advantage):
    new = torch.tensor([[difference]], dtype=torch.float64, requires_grad=True)
    loss, clipped = clipped_policy_loss(new, torch.zeros_like(new), torch.full_like(new, advantage), 0.2, 0.2)
    expected, was_clipped = reference.policy_loss(difference, 0.0, advantage, 0.2, 0.2)
    loss.sum().backward()
    close(loss.detach(), [[expected]])
    assert clipped.item() == was_clipped
    close(new.grad, slopes(lambda x: reference.policy_loss(x[0][0], 0.0, advantage, 0.2, 0.2)[0], [[difference]]))


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
def test_kl_and_its_gradient(kind, scale):
    rng = random.Random(1)
    for _ in range(CASES):
        rows, columns = rng.randint(1, 3), rng.randint(1, 4)
        new, ref = random_table(rng, rows, columns, scale), random_table(rng, rows, columns, scale)

        def table(new, ref=ref):
            return [
                [reference.kl(n, r, kind) for n, r in zip(ns, rs, strict=True)] for ns, rs in zip(new, ref, strict=True)
            ]

        x = torch.tensor(new, dtype=torch.float64, requires_grad=True)
        ours = kl_estimate(x, torch.tensor(ref, dtype=torch.float64), kind)
        ours.sum().backward()
        close(ours.detach(), table(new))
        close(x.grad, slopes(lambda new, table=table: sum(map(sum, table(new))), new))


def test_unknown_kl_is_an_error():
    with pytest.raises(KeyError):
        kl_estimate(torch.zeros(1, 1), torch.zeros(1, 1), "k4")


@pytest.mark.parametrize("mode", MODES)
def test_aggregation_is_the_same_in_any_split_and_ignores_padding(mode):
    rng = random.Random(2)
    for _ in range(CASES):
        rows, columns = rng.randint(2, 6), rng.randint(1, 6)
        values, mask = random_table(rng, rows, columns, 1.0), random_mask(rng, rows, columns)
        m = torch.tensor(mask)
        v = torch.tensor(values, dtype=torch.float64).masked_fill(m == 0, torch.nan).requires_grad_()
        expected = reference.aggregate(values, mask, mode)
        whole = loss_sum(v, m, mode) / loss_count(m, mode)
        whole.backward()
        close(whole.detach(), expected)
        close(v.grad, slopes(lambda values, mask=mask: reference.aggregate(values, mask, mode), values))

        cut = rng.randint(1, rows - 1)
        wider = torch.nn.functional.pad(v.detach(), (0, 3), value=torch.inf), torch.nn.functional.pad(m, (0, 3))
        parts = [(v[:cut].detach(), m[:cut]), (wider[0][cut:], wider[1][cut:])]
        total = sum(loss_sum(*part, mode) for part in parts) / sum(loss_count(part[1], mode) for part in parts)
        close(total, expected)
