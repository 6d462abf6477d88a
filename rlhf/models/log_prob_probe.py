"""Checks at the start that a model's chunked log-probs agree with its logits."""

import logging
from typing import Any

import torch
from torch import nn

from rlhf.models.log_prob_head import LogProbModel, Targets
from rlhf.ranks import dims
from rlhf.ranks.collectives import all_max

log = logging.getLogger(__name__)

TOKENS = 8
TOLERANCES = {
    torch.float64: 1e-9,
    torch.float32: 1e-3,
    torch.float16: 0.03,
    torch.bfloat16: 0.25,  # rounding alone changes logits of 16 or more by more than 0.05
}
"""Largest difference of log-probs for each type of logits."""


@torch.no_grad()
def check_log_probs(module: nn.Module, device: torch.device) -> None:
    """Compare the log-probs of `module` with its logits; if they differ, switch chunks off and log why. Collective."""
    model: Any = next(part for part in module.modules() if isinstance(part, LogProbModel))
    if model.whole_logits is None:
        ids = torch.arange(1, TOKENS + 1, device=device)[None]
        logits = module(input_ids=ids, use_cache=False).logits[0, :-1]
        wide = torch.promote_types(logits.dtype, torch.float32)
        expected = logits.to(wide).log_softmax(dim=-1).gather(1, ids[0, 1:, None])[:, 0]
        targets = Targets(torch.arange(TOKENS - 1, device=device), ids[0, 1:], 1.0, with_entropy=False)
        found, _ = module(input_ids=ids, use_cache=False, targets=targets)
        difference = float(all_max((found - expected).abs().max().nan_to_num(nan=torch.inf)))
        if difference > TOLERANCES[logits.dtype]:
            model.whole_logits = f"log-probs of {model.config.model_type} in chunks are off by {difference:.3g}"
    if model.whole_logits is not None and dims.everyone().rank == 0:
        log.warning(
            "Log-probs are not computed in chunks, because %s. All logits of a micro-batch are in memory at once.",
            model.whole_logits,
        )
