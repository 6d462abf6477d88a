"""Weights and Adam's moments that leave a GPU between phases: the memory that torch keeps, and the pinned copies."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf.backends import build_backend
from rlhf.backends.base import TrainingBackend
from rlhf.backends.training import Training
from rlhf.config import BackendConfig, OptimConfig, TrainedFsdpConfig
from tests.support.engines import NEEDS_DEEPSPEED
from tests.support.gpus import NEEDS_GPU
from tests.support.numeric_ranks import single_rank
from tests.support.tiny_models import tiny_config

pytestmark = NEEDS_GPU
SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "vocab_size": 512}
ENGINES = {"fsdp2": BackendConfig(), "zero2": BackendConfig(name="deepspeed", zero_stage=2)}
ENGINES["zero3"] = BackendConfig(name="deepspeed", zero_stage=3)


def step(backend: TrainingBackend, device: torch.device) -> None:
    ids = torch.arange(16, device=device)[None]
    with backend.on_device():
        backend.backward(backend.module(input_ids=ids, use_cache=False).logits.logsumexp(-1).mean())
        backend.optimizer_step()


def copies(backend: TrainingBackend) -> dict[str, torch.Tensor]:
    shards = [*backend.model_shards().items(), *backend.optimizer_shards().items()]
    return {name: shard.local.detach().cpu().clone() for name, shard in shards}


@pytest.mark.parametrize(
    "kind", ["fsdp2", pytest.param("zero2", marks=NEEDS_DEEPSPEED), pytest.param("zero3", marks=NEEDS_DEEPSPEED)]
)
def test_idle_weights_and_moments_leave_the_device(kind: str) -> None:
    device = torch.device("cuda", 0)
    with single_rank("cpu:gloo,cuda:nccl"):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(tiny_config("llama", **SIZES))
        weights = 4 * sum(parameter.numel() for parameter in model.parameters())
        before = torch.cuda.memory_allocated()
        backend = build_backend(
            model,
            ENGINES[kind],
            device,
            Training(
                OptimConfig(lr=1e-3),
                grad_clip=1.0,
                total_optimizer_steps=4,
                offload=TrainedFsdpConfig(param_offload=True, optimizer_offload=True),
            ),
        )

        def allocated() -> int:
            return torch.cuda.memory_allocated() - before

        step(backend, device)  # from now on, cuBLAS and other libraries have their workspaces
        idle = allocated()
        torch.cuda.reset_peak_memory_stats()
        step(backend, device)
        assert torch.cuda.max_memory_allocated() - before > 4 * weights  # weights, gradients and two moments
        assert allocated() < idle + 0.05 * weights < 0.55 * weights
        with backend.on_device():
            assert weights <= allocated() - idle
            assert torch.cuda.memory_reserved() - before < 4 * weights  # freed for other programs, not only for torch
        held = copies(backend)
        moved = [*backend.model_shards().values(), *backend.optimizer_shards().values()]
        big = [shard.local for shard in moved if shard.local.numel() > 1]
        assert all(tensor.is_pinned() for tensor in big)
        with backend.on_device():
            pass
        assert all(torch.equal(tensor, held[name]) for name, tensor in copies(backend).items())
        handed = dict(backend.full_tensors())
        assert {tensor.device for tensor in handed.values()} == {device}
        assert all(torch.equal(tensor.cpu().view(-1), held[name].view(-1)) for name, tensor in handed.items())
