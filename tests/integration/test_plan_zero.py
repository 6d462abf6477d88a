"""Plan of a model in training against the memory that a rank of DeepSpeed takes: 11M parameters, two micro-batches."""

import ctypes
import gc
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from rlhf.backends import build_backend
from rlhf.backends.training import Training
from rlhf.config import BackendConfig, OptimConfig
from rlhf.planning.activations import PACKED, pass_cost
from rlhf.planning.model_passes import ModelPasses
from rlhf.planning.model_shapes import ModelShapes
from rlhf.planning.pass_sizes import PassSize
from rlhf.planning.training_state import trained_state
from tests.support.checkpoints import run_ranks
from tests.support.engines import CPU, NEEDS_DEEPSPEED
from tests.support.measured_memory import begin_anew, highest
from tests.support.tiny_models import tiny_config

pytestmark = [
    NEEDS_DEEPSPEED,
    pytest.mark.skipif(sys.platform != "linux", reason="reads the highest resident memory from Linux"),
]

SIZES = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8}
TOKENS, MICRO_BATCHES = 4, 2
M_MMAP_THRESHOLD = -3


def model_of(**sizes: Any) -> Any:
    return AutoModelForCausalLM.from_config(tiny_config("llama", num_key_value_heads=4, vocab_size=1024, **sizes))


def engine_of(stage: int, **sizes: Any) -> Any:
    config = BackendConfig(name="deepspeed", zero_stage=stage)
    options: dict[str, Any] = {"grad_clip": 1.0, "total_optimizer_steps": 5}
    return build_backend(model_of(**sizes), config, CPU, Training(OptimConfig(), **options))


def step(backend: Any) -> None:
    for _ in range(MICRO_BATCHES):
        logits = backend.module(input_ids=torch.ones(1, TOKENS, dtype=torch.int64), use_cache=False).logits
        backend.backward(logits.sum())
    backend.optimizer_step()


def partitions(rank: int, stages: list[int]) -> dict[int, tuple[int, int]]:
    """Return, by stage, the planned and the measured bytes that a model in training adds to the process."""
    # Map each tensor separately, so that gaps between tensors do not count.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 256 << 10)
    torch.use_deterministic_algorithms(True)  # it also fills fresh memory, as in runs
    found = {}
    for stage in stages:
        # Do a step first, so that DeepSpeed's imports and compiled code are not measured.
        step(engine_of(stage, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4))
        gc.collect()
        begin_anew()
        before = highest()
        backend = engine_of(stage, **SIZES)
        step(backend)
        begin_anew()
        step(backend)
        found[stage] = (planned(stage), highest() - before)
        del backend
        gc.collect()
    return found


def planned(stage: int) -> int:
    with torch.device("meta"):
        model = model_of(**SIZES)
    shapes = ModelShapes({name: tuple(p.shape) for name, p in model.named_parameters()}, model.config.to_dict())
    state = trained_state(shapes, BackendConfig(name="deepspeed", zero_stage=stage), dist.get_world_size())
    cost = pass_cost(shapes, 4, PACKED)
    actor = ModelPasses("actor", shapes, state, cost, "cpu")
    update = actor.resident("actor update") | actor.update(PassSize(TOKENS, TOKENS, TOKENS, MICRO_BATCHES))
    return sum(update.values())


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_each_stage_is_planned_within_a_tenth(ranks, tmp_path: Path):
    for found in run_ranks(ranks, partitions, [1, 2, 3], deadline_s=600, join=tmp_path / "join"):
        assert len(found) == 3
        assert {stage: sizes for stage, sizes in found.items() if abs(sizes[0] - sizes[1]) > sizes[1] / 10} == {}
