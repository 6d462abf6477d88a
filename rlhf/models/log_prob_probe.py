"""Compares a model's log-probs with those of its own logits, on the model as it is trained."""

import logging
from typing import Any

import torch
from torch import nn

from rlhf.models.log_prob_head import LogProbModel, Targets
from rlhf.ranks import dims
from rlhf.ranks.collectives import all_max

log = logging.getLogger(__name__)

TOKENS = 8
TOLERANCES = {torch.float32: 1e-3}
LARGE = 0.25  # tolerance in half precision, where logits of 16 or more are already off by more than 0.05


@torch.no_grad()
def check_log_probs(module: nn.Module, device: torch.device) -> None:
    """Compare log-probs of `module` with its logits; if they differ, compute all targets' logits at once and log why.
    Collective."""
    model: Any = next(part for part in module.modules() if isinstance(part, LogProbModel))
    if model.whole_logits is None:
        ids = torch.arange(1, TOKENS + 1, device=device)[None]
        logits = module(input_ids=ids, use_cache=False).logits[0, :-1]
        expected = logits.float().log_softmax(dim=-1).gather(1, ids[0, 1:, None])[:, 0]
        targets = Targets(torch.arange(TOKENS - 1, device=device), ids[0, 1:], 1.0, with_entropy=False)
        found, _ = module(input_ids=ids, use_cache=False, targets=targets)
        difference = float(all_max((found - expected).abs().max().nan_to_num(nan=torch.inf)))
        if difference > TOLERANCES.get(logits.dtype, LARGE):
            model.whole_logits = f"{model.config.model_type} makes its logits in another way (off by {difference:.3g})"
    if model.whole_logits is not None and dims.everyone().rank == 0:
        log.warning("The logits of all tokens of a micro-batch are in memory at once: %s.", model.whole_logits)
