"""Tests the reference policy: frozen, or a moving average of the actor, with sharded parameters."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlhf.assemble.learners import build_frozen
from rlhf.backends import build_backend
from rlhf.backends.fsdp2 import Fsdp2Backend, Fsdp2Model
from rlhf.backends.training import Training
from rlhf.config import BackendConfig, FrozenFsdpConfig, OptimConfig, RefConfig
from rlhf.learning.reference import Reference
from rlhf.models.loading import ModelSource
from rlhf.models.model_files import ModelFiles
from rlhf.models.skeleton import cast_parameters
from rlhf.models.weights import ModelReader, PendingModel
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.gloo import GlooTransport
from tests.support.checkpoints import equal_bits
from tests.support.in_float64 import TOLERANCE, in_float64
from tests.support.numeric_ranks import run_ranks, single_rank
from tests.support.tiny_updates import balance_in_order, random_batch, tiny_qwen2

CPU = torch.device("cpu")
ALPHA = 0.25


def actor_at(step: int) -> dict[str, Tensor]:
    """Return the actor's weights after `step` steps: a different random model for each step."""
    return dict(tiny_qwen2(seed=step).named_parameters())


def moved(config: RefConfig, steps: int) -> tuple[list[int], dict[str, Tensor], Tensor]:
    """Return the reference's last update as of each step, and its final unsharded weights and log-probs."""
    backend = Fsdp2Backend(
        tiny_qwen2(seed=100),
        BackendConfig(reshard_after_forward=False),
        CPU,
        Training(OptimConfig(), grad_clip=1.0, total_optimizer_steps=1),
    )
    model = Fsdp2Model(tiny_qwen2(seed=100), BackendConfig(reshard_after_forward=False), CPU)
    reference, batch = Reference(model, 1.0, 40, config), random_batch(seed=3, samples=4)
    held = balance_in_order(batch, ranks=dist.get_world_size())
    at = []
    for step in range(1, steps + 1):
        # The pass leaves gathered weights in place (`reshard_after_forward=False`). `maybe_update` must not
        # mistake gathered weights for shards, and the next pass must gather the moved shards again.
        reference.all_log_probs(batch, held)
        whole = actor_at(step)
        for name, shard in backend.model_shards().items():
            shard.local.copy_(shard.cut(whole[name].detach()))
        reference.maybe_update(backend, step)
        at.append(reference.updated_at)
    weights = {name: tensor.clone() for name, tensor in model.full_tensors()}
    return at, weights, reference.all_log_probs(batch, held)


@in_float64()
def on_cadence() -> tuple[list[int], dict[str, Tensor], Tensor]:
    return moved(RefConfig(update_freq=3, alpha=ALPHA), steps=7)


def frozen() -> tuple[list[int], dict[str, Tensor], Tensor]:
    return moved(RefConfig(), steps=2)


@pytest.mark.parametrize("world_size", [1, 2])
@in_float64()
def test_a_moving_reference_moves_all_weights_on_its_cadence_only(world_size):
    results = run_ranks(world_size, on_cadence)
    expected = dict(tiny_qwen2(seed=100).named_parameters())
    for step in (3, 6):
        expected = {name: (1 - ALPHA) * old + ALPHA * actor_at(step)[name] for name, old in expected.items()}
    by_hand = tiny_qwen2()
    by_hand.load_state_dict(expected, strict=False)
    for at, weights, log_probs in results:
        assert at == [0, 0, 3, 3, 3, 6, 6]
        assert weights.keys() == expected.keys()
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, expected[name], rtol=TOLERANCE, atol=TOLERANCE)
        torch.testing.assert_close(log_probs, plain_log_probs(by_hand), rtol=TOLERANCE, atol=TOLERANCE)


def plain_log_probs(model) -> Tensor:
    from rlhf.learning.policy import response_log_probs
    from rlhf.models.log_prob_head import with_log_probs

    with torch.no_grad():
        return response_log_probs(with_log_probs(model), random_batch(seed=3, samples=4), 1.0, with_entropy=False)[0]


def test_a_frozen_reference_keeps_the_starting_weights():
    ((at, weights, _),) = run_ranks(1, frozen)
    assert at == [0, 0]
    for name, parameter in tiny_qwen2(seed=100).named_parameters():
        assert torch.equal(weights[name], parameter)


def bfloat16_references() -> list[tuple[str, bool, bool]]:
    """Return, for each precision of the pass, whether storage and log-probs of a bfloat16 reference are right.

    Storage: all weights are bfloat16, and buffers are unchanged. Log-probs: equal to those of the same weights stored
    in float32. Only passes in float32 need weights that bfloat16 can express.
    """
    batch = random_batch(seed=3, samples=4)
    held = balance_in_order(batch, ranks=dist.get_world_size())
    reader = ModelReader(
        ModelFiles(ModelSource("model.path", ""), Path(), None, None, ""), Coordinator(GlooTransport()), CPU
    )
    found = []
    for autocast in ("none", "bfloat16"):
        config, log_probs, models = BackendConfig(autocast=autocast), [], []
        for dtype in ("float32", "bfloat16" if autocast == "none" else None):
            start = tiny_qwen2(seed=100)
            start = start.bfloat16().float() if autocast == "none" else start
            models.append(build_frozen(PendingModel(start, {}, reader), config, FrozenFsdpConfig(dtype), CPU))
            log_probs.append(Reference(models[-1], 1.0, 40, RefConfig()).all_log_probs(batch, held))
        narrow = all(shard.local.dtype == torch.bfloat16 for shard in models[1].model_shards().values())
        buffers = equal_bits(*(dict(model.module.named_buffers()) for model in models))
        found.append((autocast, narrow and buffers, torch.equal(*log_probs)))
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_bfloat16_reference_computes_the_log_probs_of_the_same_float32_weights(world_size):
    for found in run_ranks(world_size, bfloat16_references):
        assert found == [("none", True, True), ("bfloat16", True, True)]


@pytest.mark.parametrize("autocast", ["none", "bfloat16"])
def test_autocast_of_weights_that_the_architecture_wants_in_float32_is_logged(autocast, caplog):
    model = tiny_qwen2()
    model._keep_in_fp32_modules_strict = {"input_layernorm"}
    options: dict[str, Any] = {"grad_clip": 1.0, "total_optimizer_steps": 1}
    with single_rank():
        build_backend(model, BackendConfig(autocast=autocast), CPU, Training(OptimConfig(), **options))
    logged = "2 that qwen2 needs in float32, such as model.layers.0.input_layernorm.weight"
    assert (logged in caplog.text) is (autocast == "bfloat16")


def test_weights_that_the_architecture_wants_in_float32_are_not_cast():
    model = tiny_qwen2()
    model._keep_in_fp32_modules_strict = {"input_layernorm"}
    cast_parameters(model, torch.bfloat16)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if "input_layernorm" in name else torch.bfloat16), name
    assert model.lm_head.weight is model.model.embed_tokens.weight
