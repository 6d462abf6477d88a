"""Compares the engine with the trainer after the first sleep: with rollout.sleep_level=2, vLLM may lose tensors."""

import torch

from rlhf.backends.base import PolicyWeights
from rlhf.errors import UserError
from rlhf.models.log_prob_head import Targets
from rlhf.ranks.collectives import all_max
from rlhf.rollout import Request, Sample, SamplingParams

PROMPT, RESPONSE = 8, 8
"""Lengths of the probe's prompt and response, in tokens."""
BOUND = 0.25
"""Largest mean difference of log-probs. Rounding to bfloat16 causes less; lost tensors cause whole nats."""


def probe_request() -> Request:
    """Return a request for a greedy response, the same on every rank."""
    return Request(0, list(range(1, PROMPT + 1)), SamplingParams(temperature=0.0, max_tokens=RESPONSE, ignore_eos=True))


@torch.no_grad()
def check_probe(actor: PolicyWeights, sample: Sample) -> None:
    """Compare the log-probs of a response to `probe_request` with the actor's. Collective.

    Raises:
        UserError: on every rank, if the mean difference on any rank exceeds `BOUND`.
    """
    with actor.on_device():
        device = next(actor.module.parameters()).device
        labels = torch.tensor(sample.token_ids.tolist(), device=device)
        ids = torch.cat([torch.tensor(probe_request().token_ids, device=device), labels])
        targets = Targets(torch.arange(PROMPT - 1, len(ids) - 1, device=device), labels, 1.0, with_entropy=False)
        expected, _ = actor.module(input_ids=ids[None], use_cache=False, targets=targets)
    found = torch.tensor(sample.log_probs.tolist(), device=device)
    apart = float(all_max((found - expected).abs().mean().nan_to_num(nan=torch.inf)))
    if apart > BOUND:
        raise UserError(
            f"rollout.sleep_level=2: after its first sleep, vLLM's log-probs differ from the trainer's by {apart:.3g} "
            f"on average (limit {BOUND}). vLLM seems to lose tensors of this model when it sleeps without a copy of "
            "the weights. Set rollout.sleep_level=1."
        )
