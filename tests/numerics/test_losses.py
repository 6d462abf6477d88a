"""Compares policy and value losses and their gradients with loops over floats, for every aggregation mode."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rlhf.algorithms import losses
from rlhf.algorithms.aggregation import loss_count, loss_sum
from rlhf.algorithms.losses import PolicyLoss, value_loss
from rlhf.config import ActorConfig, PolicyLossConfig
from tests.support import float_reference as reference
from tests.support.in_float64 import TOLERANCE
from tests.support.rounding import FLOAT32
from tests.support.tables import MODES, SLOPES, Rows, close, random_mask, random_table, slopes, tensor

CASES = 20
FIGURES = {"vanilla": ["pg_clipfrac", "pg_clipfrac_lower"], "gspo": ["pg_clipfrac"], "cispo": ["pg_clipfrac"]}
FIGURES |= {"sapo": ["sapo_weight"]}
CLIPS = [(0.2, 0.2, 3.0), (0.2, 0.28, 1.2), (0.05, 0.5, 1.5), (0.0, 0.0, 3.0)]


def tolerance_of(name: str) -> float:
    """SAPO's temperatures are float32 numbers; everything else is float64."""
    return 4 * FLOAT32 if name == "sapo" else TOLERANCE


def policy_loss(
    name: str, new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, config: ActorConfig
) -> PolicyLoss:
    return getattr(losses, name)(new, old, advantages, mask, config)


def expected_tokens(
    name: str, new: Rows, now: Rows, old: Rows, advantages: Rows, mask: Rows, config: ActorConfig
) -> list[list[list[float]]]:
    """Return loss and metrics of each token in the mask, by row. `now` is `new` where a formula stops the gradient."""
    low, high, c = config.clip_ratio_low, config.clip_ratio_high, config.clip_ratio_c
    result = []
    for row in zip(new, now, old, advantages, mask, strict=True):
        x, stopped, o, a = (reference.tokens_of(values, row[-1]) for values in row[:-1])
        if name == "gspo":
            result.append(reference.gspo(x, stopped, o, a, low, high))
        elif name == "sapo":
            taus = config.tau_pos, config.tau_neg
            result.append([reference.sapo(*token, *taus) for token in zip(x, o, a, strict=True)])
        elif name == "cispo":
            result.append([reference.cispo(*token, low, high) for token in zip(x, stopped, o, a, strict=True)])
        else:
            result.append([reference.vanilla(*token, low, high, c) for token in zip(x, o, a, strict=True)])
    return result


def part(tokens: list[list[list[float]]], index: int, mask: Rows) -> Rows:
    return reference.on_tokens([[token[index] for token in row] for row in tokens], mask)


def value_of(function: Callable[[Rows], list[list[list[float]]]], mask: Rows, mode: str) -> Callable[[Rows], float]:
    return lambda new: reference.aggregate(part(function(new), 0, mask), mask, mode, 7)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("name", FIGURES)
def test_policy_loss_and_its_gradient(name, clip, mode):
    rng = random.Random(0)
    config = ActorConfig(clip_ratio_low=clip[0], clip_ratio_high=clip[1], clip_ratio_c=clip[2], tau_neg=clip[2])
    changed: dict[str, set[bool]] = {figure: set() for figure in FIGURES[name]}
    for _ in range(CASES):
        rows, columns = rng.randint(1, 4), rng.randint(1, 6)
        old, mask = random_table(rng, rows, columns, 1.0), random_mask(rng, rows, columns)
        new = [[o + rng.gauss(0, 0.8) for o in row] for row in old]
        advantages = random_table(rng, rows, columns, 1.0)
        advantages[0][0] = 0.0

        def tokens(x, now=[list(row) for row in new], old=old, advantages=advantages, mask=mask):  # noqa: B006
            return expected_tokens(name, x, now, old, advantages, mask, config)

        x, m = tensor(new, mask).requires_grad_(), torch.tensor(mask)
        result, figures = policy_loss(name, x, tensor(old, mask), tensor(advantages, mask), m, config)
        ours = loss_sum(result, m, mode, 7) / loss_count(m, mode)
        ours.backward()
        value = value_of(tokens, mask, mode)
        close(ours.detach(), value(new), tolerance_of(name))
        close(x.grad, slopes(value, new), SLOPES)
        assert not x.grad[m == 0].any()
        every = tokens(new)
        close(result.detach(), part(every, 0, mask), tolerance_of(name))
        assert list(figures) == FIGURES[name]
        for index, (figure, ours_of_it) in enumerate(figures.items(), start=1):
            assert not ours_of_it.requires_grad
            close(ours_of_it, part(every, index, mask), tolerance_of(name))
            changed[figure] |= {advantages[i][j] > 0 for i, j in ours_of_it.nonzero().tolist()}
    assert changed[FIGURES[name][0]] == {True, False}, "clipping must have happened for both signs of the advantage"
    if name == "vanilla":
        assert changed["pg_clipfrac_lower"] == {False}, "and dual clip for negative advantages only"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_a_policy_loss_with_chosen_tokens_and_its_gradient(name, clip, mode):
    rng = random.Random(3)
    config = ActorConfig(
        clip_ratio_low=clip[0], clip_ratio_high=clip[1], policy_loss=PolicyLossConfig(ppo_kl_coef=clip[2])
    )
    for _ in range(CASES):
        rows, columns = rng.randint(1, 4), rng.randint(1, 6)
        old, mask = random_table(rng, rows, columns, 1.0), random_mask(rng, rows, columns)
        new = [[o + rng.gauss(0, 0.8) for o in row] for row in old]
        advantages = random_table(rng, rows, columns, 1.0)
        chosen = [[float(rng.random() < 0.4) for _ in row] for row in old]

        def tokens(x, old=old, advantages=advantages, chosen=chosen, mask=mask):
            result = []
            for row in zip(x, old, advantages, chosen, mask, strict=True):
                of_row = zip(*(reference.tokens_of(values, row[-1]) for values in row[:-1]), strict=True)
                if name == "clip_cov":
                    result.append([reference.clip_cov(*token, *clip[:2]) for token in of_row])
                else:
                    result.append([reference.kl_cov(*token, clip[2]) for token in of_row])
            return result

        x, m = tensor(new, mask).requires_grad_(), torch.tensor(mask)
        loss = getattr(losses, name)
        result, figures = loss(x, tensor(old, mask), tensor(advantages, mask), m, config, tensor(chosen, mask))
        (loss_sum(result, m, mode, 7) / loss_count(m, mode)).backward()
        close(x.grad, slopes(value_of(tokens, mask, mode), new), SLOPES)
        close(result.detach(), part(tokens(new), 0, mask))
        assert list(figures) == {"clip_cov": ["pg_clipfrac", "clip_cov_frac"], "kl_cov": ["kl_cov_frac"]}[name]
        for index, figure in enumerate(figures.values(), start=1):
            assert not figure.requires_grad
            close(figure, part(tokens(new), index, mask))


@pytest.mark.parametrize("name", FIGURES)
def test_the_first_step_on_a_batch_is_the_policy_gradient(name):
    """If old and new log-probs are equal, the gradient is -A on every token, for any clip bounds."""
    rng = random.Random(1)
    mask = torch.tensor(random_mask(rng, 4, 6))
    x, advantages = tensor(random_table(rng, 4, 6, 1.0)).requires_grad_(), tensor(random_table(rng, 4, 6, 1.0))
    for low, high, _ in CLIPS:
        config = ActorConfig(clip_ratio_low=low, clip_ratio_high=high)
        result, figures = policy_loss(name, x, x.detach(), advantages, mask, config)
        (gradient,) = torch.autograd.grad(result.sum(), x)
        close(gradient, -advantages * mask)
        if name == "sapo":
            assert torch.equal(figures["sapo_weight"], mask.double())
        else:
            assert not any(figure.any() for figure in figures.values())


@pytest.mark.parametrize("advantage", [1.5, -1.5])
@pytest.mark.parametrize("difference", [9.0, 11.0, 19.0, 25.0, 1000.0, -19.0, -25.0, -1000.0])
@pytest.mark.parametrize("name", FIGURES)
def test_ratio_is_bounded(name, difference, advantage):
    config = ActorConfig(clip_ratio_c=1e12)  # without dual clip, the bound of the ratio shows
    new = [[difference]]
    x, ones = tensor(new).requires_grad_(), torch.ones(1, 1)
    result, _ = policy_loss(name, x, torch.zeros_like(x), torch.full_like(x, advantage), ones, config)
    result.sum().backward()

    def tokens(x):
        return expected_tokens(name, x, [[difference]], [[0.0]], [[advantage]], [[1.0]], config)

    close(result.detach(), part(tokens(new), 0, [[1.0]]), tolerance_of(name))
    close(x.grad, slopes(value_of(tokens, [[1.0]], "token-mean"), new), SLOPES)


def test_float32_stays_float32():
    for name in FIGURES:
        result, figures = policy_loss(name, *torch.randn(3, 2, 4), torch.ones(2, 4), ActorConfig())
        assert {t.dtype for t in (result, *figures.values())} == {torch.float32}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cliprange", [0.2, 0.5, 100.0])
def test_value_loss_and_its_gradient(cliprange, mode):
    rng = random.Random(2)
    clipped_tokens = 0
    for _ in range(CASES):
        rows, columns = rng.randint(1, 4), rng.randint(1, 6)
        new, old, returns = (random_table(rng, rows, columns, 1.0) for _ in range(3))
        mask = random_mask(rng, rows, columns)

        def tokens(x, old=old, returns=returns, mask=mask):
            return [
                [
                    reference.value_loss(*token, cliprange)
                    for token in zip(*(reference.tokens_of(v, row[-1]) for v in row[:-1]), strict=True)
                ]
                for row in zip(x, old, returns, mask, strict=True)
            ]

        x, m = tensor(new).requires_grad_(), torch.tensor(mask)
        result, clipped = value_loss(x, tensor(old), tensor(returns), cliprange)
        ours = loss_sum(result, m, mode, 7) / loss_count(m, mode)
        ours.backward()
        value = value_of(tokens, mask, mode)
        close(ours.detach(), value(new))
        close(x.grad, slopes(value, new), SLOPES)
        assert not x.grad[m == 0].any()
        close(clipped * m, part(tokens(new), 1, mask))
        clipped_tokens += int((clipped * m).sum())
    assert (clipped_tokens > 0) == (cliprange < 100)
