"""Compares the policy loss of a recipe from TRL, and its gradient, with the formulas of TRL 1.16's GRPOTrainer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf.algorithms.aggregation import loss_count, loss_sum
from rlhf.algorithms.lookup import load_policy_loss
from rlhf.cli.translate import recipe_of
from rlhf.compose import compose_config
from rlhf.config.library import Library

LONGEST = 6


def of_trl(new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, given: dict[str, Any]) -> Tensor:
    """Return the loss of a batch without accumulation steps. Tensors are [N, R], advantages [N, 1]."""
    kind, low = given["loss_type"], given.get("epsilon", 0.2)
    high = given.get("epsilon_high", low)
    log_weights = new - old
    if given.get("importance_sampling_level") == "sequence":
        log_weights = ((log_weights * mask).sum(-1) / mask.sum(-1)).unsqueeze(-1)
    ratio = torch.exp(log_weights)
    if kind == "cispo":
        losses = -torch.clamp(ratio, max=high).detach() * advantages * new
    elif kind == "sapo":
        positive, negative = given.get("sapo_temperature_pos", 1.0), given.get("sapo_temperature_neg", 1.05)
        temperatures = torch.where(advantages > 0, positive, negative)
        losses = -torch.sigmoid(temperatures * (ratio - 1)) * 4 / temperatures * advantages
    else:
        bounded = torch.clamp(ratio, 1 - low, 1 + high)
        ratio = torch.clamp(ratio, max=given.get("delta")) if "delta" in given else ratio
        losses = -torch.min(ratio * advantages, bounded * advantages)
    if kind in ("grpo", "sapo"):
        return ((losses * mask).sum(-1) / mask.sum(-1)).mean()
    return (losses * mask).sum() / (len(mask) * LONGEST if kind == "dr_grpo" else mask.sum())


@pytest.mark.parametrize(
    "given",
    [
        {"loss_type": "grpo"},
        {"loss_type": "grpo", "epsilon": 0.1, "epsilon_high": 0.3, "delta": 2.0},
        {"loss_type": "dapo", "epsilon_high": 0.28},
        {"loss_type": "dapo", "delta": 1.5},
        {"loss_type": "bnpo"},
        {"loss_type": "dr_grpo", "delta": 1.5},
        {"loss_type": "cispo", "epsilon_high": 5.0},
        {"loss_type": "cispo", "epsilon_high": 1.28},
        {"loss_type": "cispo", "epsilon": 1.5},
        {"loss_type": "sapo"},
        {"loss_type": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 3.0},
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
        {"loss_type": "dapo", "importance_sampling_level": "sequence", "epsilon_high": 0.1},
    ],
    ids=str,
)
def test_a_recipe_has_the_loss_of_trl(given: dict[str, Any], tmp_path: Path) -> None:
    lines = [f"{name}: {value}" for name, value in given.items()]
    (tmp_path / "trl.yaml").write_text("\n".join([*lines, f"max_completion_length: {LONGEST}", "model_name: x"]))
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "trl.yaml").write_text(recipe_of(tmp_path / "trl.yaml"))
    config = compose_config(["recipes=trl"], Library.find(tmp_path))
    actor = config.actor
    torch.manual_seed(0)
    old, advantages = -torch.rand(40, LONGEST, dtype=torch.float64), torch.randn(40, 1, dtype=torch.float64)
    mask = (torch.arange(LONGEST) < torch.randint(1, LONGEST + 1, (40, 1))).double()
    new = (old + torch.randn(40, LONGEST, dtype=torch.float64)).requires_grad_()
    theirs = of_trl(new, old, advantages, mask, given)
    (slope,) = torch.autograd.grad(theirs, new)
    losses = load_policy_loss(actor.policy_loss.loss_mode)(new, old, advantages.expand_as(mask), mask, actor).losses
    ours = loss_sum(losses, mask, actor.loss_agg_mode, LONGEST) / loss_count(mask, actor.loss_agg_mode)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(torch.autograd.grad(ours, new)[0], slope, rtol=1e-6, atol=1e-9)


def test_a_bound_of_cispo_below_1_is_listed(tmp_path: Path) -> None:
    (tmp_path / "trl.yaml").write_text("loss_type: cispo\nmodel_name: x\n")
    text = recipe_of(tmp_path / "trl.yaml")
    assert "epsilon_high=0.2: TRL's cispo bounds the weight by epsilon_high" in text.partition("# Not translated:")[2]
