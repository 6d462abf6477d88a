"""Runs tiny models over packed and padded sequences, on one or several ranks, for comparison."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from rlhf.backends.fsdp2 import shard
from rlhf.config import BackendConfig
from rlhf.learning.predicted_tokens import PredictedTokens
from rlhf.models.loading import without_dropout
from rlhf.models.packing import pack
from tests.support.in_float64 import in_float64
from tests.support.tiny_models import tiny_config
from tests.support.tiny_updates import EveryBatch, random_batch

LIMIT = 64
"""Positions of the models, and tokens of the longest sequence."""
WINDOW = 5
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "gemma3_text": {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt2": {"n_positions": LIMIT},
    "mistral": {"sliding_window": WINDOW},
}


def tiny_lm(architecture: str, dtype: torch.dtype = torch.float64, attention: str = "sdpa") -> PreTrainedModel:
    """Return a random causal LM with the same weights in every process."""
    torch.manual_seed(1)
    config = without_dropout(tiny_config(architecture, **ARCHITECTURES[architecture]))
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).to(dtype).train()


def skewed_batch(seed: int = 5) -> EveryBatch:
    """Return 28 samples with lengths of 1, 2, 2, the models' limit and random numbers, and with random `advantages`."""
    batch = random_batch(seed, 24, prompt=(1, 6), response=(1, 12))
    long = random_batch(seed + 1, 1, prompt=(4, 4), response=(LIMIT - 4, LIMIT - 4))
    short = random_batch(seed + 2, 3, prompt=(1, 1), response=(1, 1))
    whole = joined([short, long, batch])
    whole.response_lengths[0] = 0
    whole.response_mask[0] = False
    return whole


def joined(batches: list[EveryBatch]) -> EveryBatch:
    """Join the samples of `batches` in one batch."""

    def cat(name: str) -> Tensor | None:
        parts = [getattr(batch, name) for batch in batches]
        if parts[0] is None:
            return None
        width = max(part.shape[1] if part.dim() == 2 else 0 for part in parts)
        return torch.cat([nn.functional.pad(p, (0, width - p.shape[1])) if p.dim() == 2 else p for p in parts])

    return EveryBatch(**{field.name: cat(field.name) for field in fields(EveryBatch)})


def loss_of(model: nn.Module, batch: EveryBatch) -> Tensor:
    """Return the weighted sum of the response tokens' log-probs in the model's precision."""
    tokens = PredictedTokens.of(model, batch)
    logits = model(**tokens.inputs).logits.flatten(0, 1)[tokens.positions]
    log_probs = logits.log_softmax(dim=-1).gather(1, tokens.labels[:, None])[:, 0]
    assert batch.advantages is not None
    return (log_probs * batch.advantages[tokens.places].abs()).sum()


def loss_and_gradients(model: nn.Module, micro_batches: list[EveryBatch]) -> dict[str, Tensor]:
    """Return the loss (named "") and every gradient, summed over micro-batches and ranks."""
    first = next(model.parameters())
    dtype, loss = first.dtype, torch.zeros((), dtype=first.dtype, device=first.device)
    for micro in micro_batches:
        with in_float64() if dtype == torch.float64 else nullcontext():
            share = loss_of(model, micro)
            (share * (dist.get_world_size() if dist.is_initialized() else 1)).backward()
        loss += share.detach()
    if dist.is_initialized():
        dist.all_reduce(loss)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"": loss} | {
        name: (grad.full_tensor() if isinstance(grad, DTensor) else grad).detach() for name, grad in gradients.items()
    }


def packed_on_ranks(architectures: Sequence[str]) -> dict[str, dict[str, Tensor]]:
    """Return loss and gradients in float64 and float32 for the packed `skewed_batch`, split over ranks by `shares`."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batch = skewed_batch()
    results = {}
    for architecture in architectures:
        for dtype in (torch.float64, torch.float32):
            model = shard(tiny_lm(architecture, dtype), BackendConfig(), torch.device("cpu"))
            pack(model)
            micro_batches = [batch.micro_batch(rows) for rows in shares(world_size)[rank]]
            results[f"{architecture}/{dtype}"] = loss_and_gradients(model, micro_batches)
    return results


def shares(world_size: int) -> list[list[list[int]]]:
    """Return the rows of `skewed_batch` of each rank's two micro-batches, very unequal.

    One of several ranks has more than 50 times the tokens of another, and two of four have none.
    """
    few, most = [[1], [0, 2]], [list(range(3, 16)), list(range(16, 28))]
    return [few, most, [[], []], [[], []]][:world_size] if world_size > 1 else [[few[0] + few[1] + most[0], most[1]]]
