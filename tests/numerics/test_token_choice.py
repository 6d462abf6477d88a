"""Choice of tokens in a mini-batch against a loop over floats: masks, bounds, ties, small and whole shares; how ranks
share it is a matter of test_update_invariance.py."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rlhf.config import ActorConfig, PolicyLossConfig
from rlhf.learning.token_choice import TokenChoice
from tests.support.numeric_ranks import single_rank
from tests.support.plain_update import chosen_tokens
from tests.support.tiny_updates import EveryBatch, random_batch, with_observations

SEED, STEP = 7, 4
WIDE = {"clip_cov_lb": -9.0, "clip_cov_ub": 9.0}


def batch() -> EveryBatch:
    """Responses with holes, of several lengths; the second half has no token that counts."""
    made = with_observations(random_batch(seed=8, samples=12, response=(2, 9)))
    counted = made.response_mask.clone()
    counted[6:] = 0
    old = made.rollout_log_probs + 0.3 * torch.randn(counted.shape, generator=torch.Generator().manual_seed(1))
    return replace(made, old_log_probs=old, loss_mask=counted)


def chosen(
    made: EveryBatch, log_probs: Tensor, seed: int = SEED, step: int = STEP, **settings: float
) -> tuple[set, set]:
    """Row and place of the chosen tokens: ours, and those of the loop."""
    config = ActorConfig(clip_ratio_low=0.1, clip_ratio_high=0.1, policy_loss=PolicyLossConfig(**settings))
    with single_rank():
        ours = TokenChoice(config, seed).choose(made, made.counted, log_probs, step)
    places = {s: row.nonzero()[:, 0].tolist() for s, row in enumerate(made.counted)}
    wanted = chosen_tokens(
        made, places, dict(enumerate(log_probs)), list(made.old_log_probs), config, seed=seed, step=step
    )
    return {(s, t) for s, t in ours.nonzero().tolist()}, wanted


@pytest.mark.parametrize(
    "settings",
    [
        {"loss_mode": "kl_cov", "kl_cov_ratio": 0.2},
        {"loss_mode": "kl_cov", "kl_cov_ratio": 1.0},
        {"loss_mode": "kl_cov", "kl_cov_ratio": 1e-4},
        {"loss_mode": "clip_cov", "clip_cov_ratio": 0.1, **WIDE},
        {"loss_mode": "clip_cov", "clip_cov_ratio": 1.0, **WIDE},
        {"loss_mode": "clip_cov", "clip_cov_ratio": 1e-4, **WIDE},
        {"loss_mode": "clip_cov", "clip_cov_ratio": 0.1, "clip_cov_lb": 0.05, "clip_cov_ub": 0.5},
    ],
    ids=str,
)
def test_equals_the_loop(settings):
    made = batch()
    log_probs = made.old_log_probs + 0.2 * torch.randn(made.counted.shape, generator=torch.Generator().manual_seed(2))
    ours, wanted = chosen(made, log_probs, **settings)
    tokens = int(made.counted.sum())
    assert ours == wanted
    share = settings.get("kl_cov_ratio", settings.get("clip_cov_ratio"))
    if share == 1.0:
        # Clip-Cov leaves alone what the clip has changed already.
        assert (len(ours) == tokens) == (settings["loss_mode"] == "kl_cov")
    else:
        assert len(ours) == max(int(share * tokens), 1) < tokens


def test_chance_is_another_with_each_seed_and_step():
    made = batch()
    log_probs = made.old_log_probs.clone()
    settings = {"loss_mode": "clip_cov", "clip_cov_ratio": 0.2, **WIDE}
    found = []
    for seed, step in ((SEED, STEP), (SEED, STEP + 1), (SEED + 1, STEP)):
        ours, wanted = chosen(made, log_probs, seed, step, **settings)
        assert ours == wanted
        found.append(frozenset(ours))
    assert len(set(found)) == 3


def test_bounds_are_exclusive_and_equal_tokens_are_told_apart_by_chance():
    """Covariances of 1 and -1 exactly, each of many tokens."""
    made = batch()
    rows, columns = made.counted.shape
    made.loss_mask = torch.zeros(rows, columns)
    made.loss_mask[:, :2] = 1
    made.advantages = torch.tensor([1.0, -1.0]).repeat(rows // 2)[:, None].expand(rows, columns).contiguous()
    log_probs = torch.tensor([-1.0, -3.0]).repeat(columns)[:columns].expand(rows, columns).contiguous()
    made.old_log_probs = log_probs.clone()
    for low, high, inside in ((-1.0, 9.0, 1.0), (-9.0, 1.0, -1.0)):
        ours, wanted = chosen(
            made, log_probs, loss_mode="clip_cov", clip_cov_ratio=1.0, clip_cov_lb=low, clip_cov_ub=high
        )
        assert ours == wanted
        assert len(ours) == rows
        assert {(-2.0 - float(log_probs[s, t])) * -float(made.advantages[s, t]) for s, t in ours} == {inside}
    ours, _ = chosen(made, log_probs, loss_mode="kl_cov", kl_cov_ratio=0.25)
    # The half of those with the largest, and not the first of them.
    assert len(ours) == rows // 2
    assert {(s, t) for s, t in ours} != {(s, s % 2) for s in range(rows // 2)}
    assert all((s % 2 == 0) == (t == 0) for s, t in ours)
