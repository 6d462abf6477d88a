"""Trains a tiny model in any training backend for a few steps, and gathers its state."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlhf.backends import build_backend
from rlhf.backends.base import TrainingBackend
from rlhf.backends.training import Training
from rlhf.config import BackendConfig, OptimConfig, TrainedFsdpConfig
from rlhf.storage.boxes import layout_of, whole_box
from rlhf.storage.index_rows import covers
from rlhf.storage.shards import Shards, strided_view
from tests.support.in_float64 import in_float64
from tests.support.rounding import FLOAT32, forward_terms, independent_bound, sum_bound
from tests.support.tiny_updates import VOCAB, tiny_qwen2

NEEDS_DEEPSPEED = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed")
CPU = torch.device("cpu")
# Epsilon is far above rounding noise: with a tiny epsilon AdamW takes full steps along gradients that are only noise.
OPTIM = OptimConfig(lr=0.02, eps=1e-2, weight_decay=0.1, lr_scheduler_type="cosine", lr_warmup_steps=2)
ROWS, LENGTH, MICRO_BATCHES = 8, 9, 2
FORWARD_TERMS = forward_terms(layers=2, hidden=16, intermediate=24, head=4, tokens=LENGTH, vocabulary=VOCAB)
"""Terms of a pass through `tiny_qwen2`."""
ENGINES = {
    "fsdp2": BackendConfig(),
    "hsdp": BackendConfig(dp_replicate=2),
    **{f"zero{stage}": BackendConfig(name="deepspeed", zero_stage=stage) for stage in range(4)},
    "fsdp2-bfloat16": BackendConfig(autocast="bfloat16"),
    **{
        f"zero{stage}-bfloat16": BackendConfig(name="deepspeed", zero_stage=stage, autocast="bfloat16")
        for stage in range(4)
    },
}


@contextmanager
def engines_in_float64() -> Iterator[None]:
    """Like `in_float64`, also for DeepSpeed, whose list of CPU types lacks float64."""
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    with in_float64(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(CPU_Accelerator, "supported_dtypes", lambda self: [torch.float32, torch.bfloat16, torch.float64])
        yield


def allowed_float64_difference(steps: int, grad_clip: float) -> float:
    """Estimate how far the weights of two engines in float64 can be apart after `steps` optimizer steps.

    DeepSpeed computes the norm of the gradients, by which it clips them, in float32. So it scales all gradients of a
    step by a factor that is off by at most d, half a unit in the last place. AdamW's step is lr m / (sqrt(v) + eps),
    where |m| and sqrt(v) are at most `grad_clip` and both are off by at most the fraction d. To first order in d, which
    is 6e-8, the step is off by at most lr grad_clip / eps (d + d / 4): the second part is the largest value of
    sqrt(v) eps / (sqrt(v) + eps)^2. The bound is 2 d in place of 5/4 d.

    The rest, 3/4 d per step, is an allowance and no bound: a later gradient differs too, because the weights are
    already apart. That depends on the curvature of the loss, which no count of terms gives.
    """
    return steps * OPTIM.lr / OPTIM.eps * grad_clip * FLOAT32


def forward_bound(values: Tensor) -> float:
    """Estimate how far losses or logits of a tiny model in float32 can be from another engine's with equal weights.

    See `forward_terms` for its assumptions. The sizes are those of `tiny_qwen2`. A mean over tokens adds its terms.
    """
    return sum_bound(FORWARD_TERMS + ROWS * LENGTH) * float(values.abs().max())


def mean_loss_bound(losses: Tensor) -> float:
    """Estimate how far mean losses in float32 can be from another engine's with equal weights.

    Roundings of different operations and tokens are independent: see `independent_bound`. The mean over a batch divides
    their deviation by the square root of its tokens.
    """
    share = independent_bound(FORWARD_TERMS, torch.float32) / math.sqrt(ROWS * (LENGTH - 1))
    return share * float(losses.abs().max())


def rounded_biases_bound(losses: Tensor) -> float:
    """Estimate how far mean losses in bfloat16 can be apart if one engine rounds products before it adds biases.

    ZeRO 3 does, to the queries, keys and values in each of two layers. Roundings of different tokens are independent,
    so the mean over a batch divides their deviation by the square root of its tokens.
    """
    share = independent_bound(2 * 3, torch.bfloat16) / math.sqrt(ROWS * (LENGTH - 1))
    return share * float(losses.abs().max())


def make_engine(
    kind: str, seed: int = 0, grad_clip: float = 0.5, offload: TrainedFsdpConfig | None = None
) -> TrainingBackend:
    """Return a tiny Qwen2 in the engine `kind` of `ENGINES`, with gradients so large that they are clipped."""
    return build_backend(
        tiny_qwen2(seed),
        ENGINES[kind],
        CPU,
        Training(
            OPTIM,
            grad_clip=grad_clip,
            total_optimizer_steps=20,
            hf_files={"config.json": b"{}"},
            offload=offload or TrainedFsdpConfig(),
        ),
    )


def tokens(step: int) -> Tensor:
    """Return a step's batch, [ROWS, LENGTH], the same at any number of ranks."""
    return torch.randint(0, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))


def accumulate(backend: TrainingBackend, step: int, scale: float = 1.0) -> None:
    """Accumulate the gradient of `scale` times the mean token loss of `tokens(step)` over ranks and micro-batches."""
    for micro in tokens(step).chunk(dist.get_world_size())[dist.get_rank()].chunk(MICRO_BATCHES):
        with torch.no_grad():  # like the log-prob passes between updates
            logits_of(backend, micro)
        backend.backward(token_losses(backend, micro).sum() * scale / (ROWS * (LENGTH - 1)))


def train(backend: TrainingBackend, *steps: int) -> list[dict[str, float]]:
    """Take an optimizer step on the batch of each of `steps`; return the steps' metrics."""
    figures = []
    for step in steps:
        accumulate(backend, step)
        figures.append(backend.optimizer_step())
    return figures


@torch.no_grad()
def loss_of(backend: TrainingBackend, step: int) -> Tensor:
    """Return the mean token loss of `tokens(step)`, computed by every rank on all rows."""
    return token_losses(backend, tokens(step)).mean()


def token_losses(backend: TrainingBackend, ids: Tensor) -> Tensor:
    logits = logits_of(backend, ids)[:, :-1].float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")


def logits_of(backend: TrainingBackend, ids: Tensor) -> Tensor:
    return backend.module(input_ids=ids, use_cache=False).logits


def state_of(backend: TrainingBackend) -> dict[str, Any]:
    """Return all restored state, unsharded, by item of `checkpoint.contents`. Collective."""
    return {
        "model": gathered(backend.model_shards()),
        "optimizer": gathered(backend.optimizer_shards()),
        "extra": backend.extra_state(),
    }


def gathered(shards: Shards) -> dict[str, Tensor]:
    """Gather the ranks' shards to whole tensors. Collective. Fails if shards do not cover a tensor."""
    mine = {name: (shard.box, shard.local.reshape(-1)) for name, shard in shards.items() if shard.saved_here}
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    whole = {}
    for name, shard in shards.items():
        parts = [rank[name] for rank in ranks if name in rank]
        assert covers([box for box, _ in parts], shard.shape)
        whole[name] = torch.empty(shard.shape, dtype=shard.local.dtype)
        for box, part in parts:
            place = layout_of(box, whole_box(shard.shape), shard.shape)
            strided_view(whole[name].view(-1), place).copy_(part.view(box.sizes))
    return whole
