"""The reference policy: frozen, or an average of the actor that moves on its cadence and is whole under sharded
parameters."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlhf.backends.fsdp2 import Fsdp2Backend, Fsdp2Model
from rlhf.config import BackendConfig, OptimConfig, RefConfig
from rlhf.learning.reference import Reference
from tests.support.numeric_ranks import run_ranks
from tests.support.tiny_updates import as_held, random_batch, tiny_qwen2

CPU = torch.device("cpu")
ALPHA = 0.25


def actor_at(step: int) -> dict[str, Tensor]:
    """The actor's weights after `step` steps: here another random model each time."""
    return dict(tiny_qwen2(seed=step).named_parameters())


def moved(config: RefConfig, steps: int) -> tuple[list[int], dict[str, Tensor], Tensor]:
    """After each step when the reference last moved; at the end its weights, whole, and its log-probs."""
    backend = Fsdp2Backend(
        tiny_qwen2(seed=100),
        BackendConfig(reshard_after_forward=False),
        OptimConfig(),
        CPU,
        grad_clip=1.0,
        total_optimizer_steps=1,
        hf_files={},
    )
    model = Fsdp2Model(tiny_qwen2(seed=100), BackendConfig(reshard_after_forward=False), CPU)
    reference, batch = Reference(model, 1.0, 40, config), random_batch(seed=3, samples=4)
    held = as_held(batch, ranks=dist.get_world_size())
    at = []
    for step in range(1, steps + 1):
        # Gathered weights stay in place after this, and must neither be taken for shards nor be used again once the
        # shards have moved.
        reference.all_log_probs(batch, held)
        whole = actor_at(step)
        for name, shard in backend.model_shards().items():
            mine = whole[name].detach().reshape(-1)[shard.start : shard.start + shard.local.numel()]
            shard.local.copy_(mine.view(shard.local.shape))
        reference.maybe_update(backend, step)
        at.append(reference.updated_at)
    weights = {name: tensor.clone() for name, tensor in model.full_tensors()}
    return at, weights, reference.all_log_probs(batch, held)


def on_cadence() -> tuple[list[int], dict[str, Tensor], Tensor]:
    return moved(RefConfig(update_freq=3, alpha=ALPHA), steps=7)


def frozen() -> tuple[list[int], dict[str, Tensor], Tensor]:
    return moved(RefConfig(), steps=2)


@pytest.mark.parametrize("world_size", [1, 2])
def test_it_moves_on_its_cadence_only_and_as_a_whole(world_size):
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
            torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-6, check_dtype=False)
        torch.testing.assert_close(log_probs, plain_log_probs(by_hand), rtol=1e-4, atol=1e-4)


def plain_log_probs(model) -> Tensor:
    from rlhf.learning.log_probs import response_log_probs
    from rlhf.models.log_prob_head import with_log_probs

    with torch.no_grad():
        return response_log_probs(with_log_probs(model), random_batch(seed=3, samples=4), 1.0, with_entropy=False)[0]


def test_without_a_cadence_it_stays_at_the_start():
    ((at, weights, _),) = run_ranks(1, frozen)
    assert at == [0, 0]
    for name, parameter in tiny_qwen2(seed=100).named_parameters():
        assert torch.equal(weights[name], parameter)
