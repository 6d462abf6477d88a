"""Compares updates on real ranks with a plain loop over sequences: gradients, weights and metrics.

The results must be equal for every token budget, packed or padded, any number of ranks and any split over them. All in
float64, so that rounding errors are small.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.in_float64 import TOLERANCE, in_float64
from tests.support.numeric_ranks import run_ranks
from tests.support.plain_update import Plain, log_softmax_of, near_tokens, plain_actor, plain_critic, written
from tests.support.tiny_updates import tiny_value_model
from tests.support.update_cases import (
    ACTOR_CASES,
    CASES,
    GROUP,
    OLDER_CASES,
    PROMPTS,
    REJECTING_CASES,
    TOTAL_STEPS,
    batch_of,
    run_update,
    start_policies,
    with_optim,
)

# World size -> (token budget of a micro-batch, columns of extra padding (0: packed), assignment of samples to ranks).
SPLITS = {
    1: [(1000, 0, "plan"), (60, 0, "plan"), (1, 6, "plan")],
    2: [(1000, 6, "plan"), (60, 0, "lone")],
}


@in_float64()
def every_update() -> dict[str, dict[str, Any]]:
    return {
        f"{case}/{budget}/{columns}/{way}": run_update(case, budget, columns, way)
        for case in CASES
        for budget, columns, way in SPLITS[dist.get_world_size()]
    }


@pytest.fixture(scope="module")
def updates() -> dict[tuple[int, str], dict[str, Any]]:
    """Return results by (world size, "case/budget/extra columns/way"). All ranks must have equal results."""
    found = {}
    for world_size in SPLITS:
        ranks = run_ranks(world_size, every_update)
        for key, result in ranks[0].items():
            for other in ranks[1:]:
                assert_same(other[key], result, tolerance=0)
                assert other[key]["micro_batches"] == result["micro_batches"], "ranks in lockstep"
            found[world_size, key] = result
    return found


def assert_same(result: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    options = {"rtol": tolerance, "atol": tolerance, "check_dtype": False}
    torch.testing.assert_close(result["weights"], expected["weights"], **options)
    # Compare the metrics that the plain loop computes. Other tests cover the update's further metrics.
    assert expected["metrics"].keys() <= result["metrics"].keys()
    metrics = {name: result["metrics"][name] for name in expected["metrics"]}
    torch.testing.assert_close(metrics, expected["metrics"], **options)
    assert len(result["gradients"]) == len(expected["gradients"])
    # Compare only the first gradient, relative to its norm: later weights already differ by rounding.
    first, other = result["gradients"][0], expected["gradients"][0]
    norm = torch.stack([g.double().square().sum() for g in other.values()]).sum().sqrt()
    for name, gradient in other.items():
        torch.testing.assert_close(first[name] / norm, gradient / norm, **options)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("world_size", "split"), [(world, f"{b}/{c}/{way}") for world, splits in SPLITS.items() for b, c, way in splits]
)
def test_equals_the_plain_loop(updates, plain, world_size, split, case):
    assert_same(updates[world_size, f"{case}/{split}"], vars(plain[case]), TOLERANCE)


@pytest.fixture(scope="module")
@in_float64()
def plain() -> dict[str, Plain]:
    """Return the plain loop's results. Check that each case has the effect that it is meant to test."""
    found = {}
    for case, (mini_batches, config) in CASES.items():
        settings = with_optim(case, config)
        if case in ACTOR_CASES:
            model, reference = start_policies(case)
            found[case] = plain_actor(model, reference, batch_of(case), settings, mini_batches, TOTAL_STEPS)
        else:
            model = tiny_value_model()
            found[case] = plain_critic(model, batch_of(case), settings, mini_batches, TOTAL_STEPS)
        after = found[case].weights
        moved = max(float((after[name] - p.detach()).abs().max()) for name, p in model.named_parameters())
        assert moved > 0.005 * len(found[case].gradients)
    metrics = {case: result.metrics for case, result in found.items()}
    assert metrics["token-mean_k3_clipped_norm"]["grad_norm"] > 0.4
    assert metrics["seq-mean-token-mean_k2_entropy"]["grad_norm"] < 100
    for case in ("seq-mean-token-sum_k1_token_correction", "cispo_sequence_correction_norm"):
        assert 0.1 < metrics[case]["rollout/is_truncated"] < 0.9
    assert 0.1 < metrics["clip_cov_icepop_rejected_tokens"]["rollout/is_truncated"] < 0.9
    for case in REJECTING_CASES:
        config, batch = CASES[case][1].algorithm.rollout_correction, batch_of(case)
        policy = start_policies(case)[0].double()
        old = [log_softmax_of(policy, batch, s)[0] for s in range(len(batch))]
        kept = [near_tokens(batch, s, old[s], config) for s in range(len(batch))]
        tokens = int(batch.response_mask.sum())
        assert 0.1 < sum(map(len, kept)) / tokens < 0.9
        # The update also reports the fractions of rejected tokens and responses.
        found[case].metrics["rollout/rs_masked"] = 1 - sum(map(len, kept)) / tokens
        left_out = sum(kept[s] != written(batch, s) for s in range(len(batch)))
        found[case].metrics["rollout/rs_seq_masked"] = left_out / len(batch)
    for case in OLDER_CASES:
        assert metrics[case]["rollout/is_truncated"] > 0.01
    assert 0.1 < metrics["critic_clipped_values"]["vf_clipfrac"] < 0.9
    return found


def test_progress_counts_the_micro_batches_that_the_budget_gives(updates):
    counts = {}
    for (world_size, key), result in updates.items():
        reports = result["micro_batches"]
        assert reports == [(done, len(reports)) for done in range(1, len(reports) + 1)]
        counts[world_size, key] = len(reports)
    case = "one_look_at_each_sample"
    assert [counts[1, f"{case}/{split}"] for split in ("1000/0/plan", "1/6/plan")] == [1, PROMPTS * GROUP]
    assert counts[2, f"{case}/1000/6/plan"] == 1 < counts[2, f"{case}/60/0/lone"]


@pytest.mark.parametrize(
    ("case", "figure"),
    [
        ("seq-mean-token-mean_k2_entropy", "pg_clipfrac"),
        ("dual_clip", "pg_clipfrac_lower"),
        ("gspo_straight_through_rejected_tokens", "pg_clipfrac"),
        ("cispo_sequence_correction_norm", "pg_clipfrac"),
    ],
)
def test_clipping_happens_in_the_cases_that_test_it(updates, case, figure):
    assert updates[1, f"{case}/60/0/plan"]["metrics"][figure] > 0.01
