"""A ZeRO 3 engine is built from a model on the meta device, with at most one whole weight at a time on a rank."""

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from rlhf.backends import build_backend
from rlhf.backends import deepspeed as deepspeed_backend
from rlhf.backends.training import Training
from rlhf.backends.zero import partition
from rlhf.models.skeleton import replace_parameters
from tests.support.allocations import peak_of
from tests.support.checkpoints import run_ranks
from tests.support.engines import CPU, ENGINES, NEEDS_DEEPSPEED, OPTIM
from tests.support.tiny_models import tiny_config

pytestmark = NEEDS_DEEPSPEED

BUCKET = 1 << 14


def on_meta() -> PreTrainedModel:
    """Return a model of several layers with parameters on the meta device and real buffers."""
    config = tiny_config("llama", hidden_size=128, intermediate_size=512, num_hidden_layers=6)
    model = AutoModelForCausalLM.from_config(config)
    replace_parameters(model, lambda _, p: nn.Parameter(torch.empty_like(p, device="meta")))
    return model


def peaks(rank: int) -> dict[str, Any]:
    """Return the peak bytes while weights are partitioned, and while an engine is built."""
    deepspeed_backend.REDUCE_BUCKET = BUCKET
    library = deepspeed_backend.import_deepspeed(CPU)
    model, other, config = on_meta(), on_meta(), ENGINES["zero3-bfloat16"]
    sizes = [p.numel() for p in model.parameters()]
    settings = deepspeed_backend._settings(ENGINES["zero3"], 1.0, [(size, True) for size in sizes])
    init = library.zero.Init(nn.Module(), config_dict_or_path=settings, dtype=torch.float32)
    options: dict[str, Any] = {"grad_clip": 1.0, "total_optimizer_steps": 5}
    kept = []

    def cut() -> None:
        partition(model, init, CPU, torch.float32)

    def make() -> None:
        kept.append(build_backend(other, config, CPU, Training(OPTIM, **options)))

    return {"cut": peak_of(cut), "made": peak_of(make), "weights": sum(sizes), "largest": max(sizes)}


def test_no_rank_has_the_whole_model_at_a_time(tmp_path):
    for found in run_ranks(2, peaks, deadline_s=120, join=tmp_path / "join"):
        weights, largest = found["weights"], found["largest"]
        # If another rank is late, gloo's threads keep some of the weights that they have sent.
        assert 4 * weights / 2 <= found["cut"] < 4 * weights / 2 + 8 * 4 * largest < 4 * weights
        # Each of two ranks has half of the weights in bfloat16, and of masters, two moments and gradients in float32.
        resident = (2 + 4 + 8 + 4) * weights / 2
        assert resident <= found["made"] < resident + 0.4 * 4 * weights
