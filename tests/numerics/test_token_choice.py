"""Compares the choice of tokens in a mini-batch with a loop over floats: masks, bounds, ties, small and full ratios.

`test_update_invariance.py` tests the choice over real ranks.
"""

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
    """Return responses of several lengths with observations. The loss counts no token of the second half."""
    made = with_observations(random_batch(seed=8, samples=12, response=(2, 9)))
    counted = made.response_mask.clone()
    counted[6:] = 0
    old = made.rollout_log_probs + 0.3 * torch.randn(counted.shape, generator=torch.Generator().manual_seed(1))
    return replace(made, old_log_probs=old, loss_mask=counted)


def chosen(
    made: EveryBatch, log_probs: Tensor, seed: int = SEED, step: int = STEP, **settings: float
) -> tuple[set, set]:
    """Return row and column of each chosen token: by `TokenChoice`, and by the loop."""
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
        # Clip-Cov never chooses tokens whose loss is clipped already.
        assert (len(ours) == tokens) == (settings["loss_mode"] == "kl_cov")
    else:
        assert len(ours) == max(int(share * tokens), 1) < tokens


def test_every_seed_and_step_has_another_random_choice():
    made = batch()
    log_probs = made.old_log_probs.clone()
    settings = {"loss_mode": "clip_cov", "clip_cov_ratio": 0.2, **WIDE}
    found = []
    for seed, step in ((SEED, STEP), (SEED, STEP + 1), (SEED + 1, STEP)):
        ours, wanted = chosen(made, log_probs, seed, step, **settings)
        assert ours == wanted
        found.append(frozenset(ours))
    assert len(set(found)) == 3


def test_bounds_are_exclusive_and_ties_are_broken_at_random():
    """Many tokens have a covariance of exactly 1, and many of exactly -1."""
    made = batch()
    rows, columns = made.counted.shape
    made.loss_mask = torch.zeros(rows, columns, dtype=torch.bool)
    made.loss_mask[:, :2] = True
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
    # Half of the tokens with the largest covariance are chosen, and not simply the first half.
    assert len(ours) == rows // 2
    assert {(s, t) for s, t in ours} != {(s, s % 2) for s in range(rows // 2)}
    assert all((s % 2 == 0) == (t == 0) for s, t in ours)
