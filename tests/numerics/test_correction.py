"""Compares importance weights, rejection sampling and the over-long punishment with loops over floats."""

import math
import random

import pytest
import torch

from rlhf.algorithms.correction import accepted, rollout_is_weights
from rlhf.algorithms.shaping import overlong_penalty
from rlhf.config import ActorConfig, BackendConfig, GuardsConfig
from rlhf.config.schema.algorithm import ROLLOUT_RS, RolloutCorrectionConfig
from rlhf.learning.actor import Actor
from rlhf.learning.guards import Guards
from tests.support import float_reference as reference
from tests.support.numeric_ranks import single_rank
from tests.support.tables import close, random_mask, random_table, tensor
from tests.support.tiny_updates import balance_in_order, random_batch, tiny_qwen2
from tests.support.update_cases import OPTIM, engine


@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
@pytest.mark.parametrize("threshold", [0.5, 2.0, 1e9])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("lower", [None, 0.4])
def test_importance_weights(lower, level, threshold, scale):
    rng = random.Random(3)
    seen = set()
    for _ in range(25):
        rows, columns = rng.randint(1, 5), rng.randint(1, 8)
        rollout, mask = random_table(rng, rows, columns, 1.0), random_mask(rng, rows, columns)
        old = [[r + rng.gauss(0, scale) for r in row] for row in rollout]
        x = tensor(old, mask).requires_grad_()
        ours = rollout_is_weights(x, tensor(rollout, mask), torch.tensor(mask), level, threshold, lower)
        expected = reference.is_weights(old, rollout, mask, level, threshold, lower)
        for index, table in enumerate(ours):
            assert not table.requires_grad
            assert not table[torch.tensor(mask) == 0].any()
            rows_of_it = [[token[index] for token in row] for row in expected]
            close(table, reference.on_tokens(rows_of_it, mask))
        seen |= {value for row in expected for _, value in row}
    if scale == 1.0:
        assert seen == ({0.0} if threshold == 1e9 and lower is None else {0.0, 1.0})


@pytest.mark.parametrize(("threshold", "lower"), [(2.0, None), (1.3, 0.4), (0.2, 0.1), (1e80, None)])
@pytest.mark.parametrize("kind", ROLLOUT_RS)
def test_rejected_tokens_and_responses(kind, threshold, lower):
    rng = random.Random(5)
    seen = set()
    for _ in range(40):
        rows, columns = rng.randint(1, 5), rng.randint(1, 8)
        rollout, mask = random_table(rng, rows, columns, 1.0), random_mask(rng, rows, columns)
        scale = rng.choice([0.1, 1.0, 9.0])
        old = [[r + rng.gauss(0, scale) for r in row] for row in rollout]
        m = torch.tensor(mask)
        ours = accepted(tensor(old, mask), tensor(rollout, mask), m, kind, threshold, lower)
        assert ours.dtype == torch.bool
        expected = reference.accepted(old, rollout, mask, kind, threshold, lower)
        close(ours.float(), reference.on_tokens(expected, mask))
        seen |= {kept for row in expected for kept in row}
    assert seen == ({1.0} if threshold == 1e80 else {0.0, 1.0})


@pytest.mark.parametrize("kind", ROLLOUT_RS)
def test_equal_log_probs_reject_no_token(kind):
    log_probs, mask = torch.randn(3, 5), torch.ones(3, 5)
    assert torch.equal(accepted(log_probs, log_probs, mask, kind, 1.001, None), mask.bool())
    assert accepted(log_probs[:, :0], log_probs[:, :0], mask[:, :0], kind, 1.001, None).shape == (3, 0)


@pytest.mark.parametrize(
    ("kind", "threshold", "lower", "kept"),
    [
        # The ratios are 2, 1, 1/2, 1/4 and exp(30); the last is clamped to exp(20).
        ("token_k1", 2.0, None, [1, 1, 1, 0, 0]),
        ("token_k1", 1.0, 0.25, [0, 1, 1, 1, 0]),
        ("token_k1", 1e12, 1.0, [1, 1, 0, 0, 1]),
        ("token_k2", math.log(2) ** 2 / 2, None, [1, 1, 1, 0, 0]),
        ("token_k2", 200.0, None, [1, 1, 1, 1, 1]),
        ("token_k3", 0.0, None, [0, 1, 0, 0, 0]),
        ("seq_max_k2", 200.0, None, [1, 1, 1, 1, 1]),
    ],
)
def test_a_divergence_equal_to_the_bound_is_accepted(kind, threshold, lower, kept):
    differences = torch.tensor([[math.log(2), 0.0, math.log(1 / 2), math.log(1 / 4), 30.0]], dtype=torch.float64)
    ours = accepted(differences, torch.zeros_like(differences), torch.ones(1, 5), kind, threshold, lower)
    assert ours.tolist() == [kept]


@pytest.mark.parametrize(("threshold", "kept"), [(1e-7, 0), (1.1e-5, 1)])
def test_a_sum_of_small_divergences_is_not_rounding(threshold, kept):
    """In float32, exp(d) - 1 - d is off by up to 6e-8 at each of these tokens, whose divergences are 5e-9 each."""
    differences = torch.full((1, 2048), 1e-4)
    ours = accepted(differences, torch.zeros_like(differences), torch.ones(1, 2048), "seq_sum_k3", threshold, None)
    assert (ours == kept).all()


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("threshold", "lower"), [(2.0, None), (1.0, 1.0)])
def test_equal_log_probs_have_weight_one(threshold, lower, level):
    log_probs = torch.randn(3, 5)
    weights, truncated = rollout_is_weights(log_probs, log_probs, torch.ones(3, 5), level, threshold, lower)
    assert torch.equal(weights, torch.ones(3, 5))
    assert not truncated.any()


@pytest.mark.parametrize("kind", [None, "token_k1", "seq_mean_k3"])
@pytest.mark.parametrize("log_prob", [math.nan, -math.inf])
def test_guards_reject_a_batch_with_rollout_log_probs_that_are_not_finite(log_prob, kind):
    """Rejection sampling alone would mask such a token without an event."""
    batch = random_batch(seed=9, samples=4)
    batch.old_log_probs = batch.rollout_log_probs.clone()
    batch.rollout_log_probs[2, 0] = log_prob
    config = ActorConfig(optim=OPTIM)
    correction = RolloutCorrectionConfig(rollout_rs=kind, rollout_rs_threshold=2.0)
    guards = Guards(GuardsConfig())
    guards.begin(1, 0.0)
    with single_rank():
        backend = engine(tiny_qwen2(), config, BackendConfig())
        actor = Actor(backend, config, correction, temperature=1.0, scale=9, log_prob_budget=60)
        assert actor.update(batch, balance_in_order(batch, 1), guards) == {}
        assert backend.extra_state()["steps_taken"]["optimizer_step"] == 0
    assert guards.rejected is not None
    assert (guards.rejected.metric, repr(guards.rejected.value)) == ("rollout_log_probs", repr(log_prob))


@pytest.mark.parametrize(("max_length", "buffer", "factor"), [(100, 20, 1.0), (64, 64, 0.5), (7, 1, 2.0)])
def test_overlong_penalty(max_length, buffer, factor):
    lengths = list(range(max_length + 1))
    ours = overlong_penalty(torch.tensor(lengths), max_length, buffer, factor)
    close(ours, [reference.overlong_penalty(n, max_length, buffer, factor) for n in lengths])
    assert ours[0] == 0
    assert ours[-1] == -factor
