"""The learning rate at every optimizer step, and that a restored schedule goes on as if nothing had happened."""

import json
import math

import pytest
import torch

from rlhf.backends.fsdp2 import Fsdp2Backend
from rlhf.backends.training import learning_rate_factor
from rlhf.config import BackendConfig, OptimConfig
from tests.support.numeric_ranks import single_rank
from tests.support.tiny_updates import tiny_qwen2

TOTAL = 20


def factors(total: int = TOTAL, **settings) -> list[float]:
    optim = OptimConfig(**settings)
    return [learning_rate_factor(optim, step, total) for step in range(total + 5)]


def test_constant():
    assert factors() == [1.0] * 25


@pytest.mark.parametrize("shape", ["constant", "linear", "cosine"])
def test_warm_up_rises_in_equal_steps_to_the_full_rate(shape):
    found = factors(lr_scheduler_type=shape, lr_warmup_steps=4)
    assert found[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.parametrize("floor", [0.0, 0.1])
@pytest.mark.parametrize("warmup", [0, 4])
def test_linear(warmup, floor):
    found = factors(lr_scheduler_type="linear", lr_warmup_steps=warmup, min_lr_ratio=floor)
    drops = [a - b for a, b in zip(found[warmup:TOTAL], found[warmup + 1 : TOTAL + 1], strict=True)]
    assert drops == pytest.approx([(1 - floor) / (TOTAL - warmup)] * (TOTAL - warmup))
    assert found[TOTAL:] == [floor] * 5


@pytest.mark.parametrize("floor", [0.0, 0.1])
@pytest.mark.parametrize("warmup", [0, 4])
def test_cosine(warmup, floor):
    found = factors(lr_scheduler_type="cosine", lr_warmup_steps=warmup, min_lr_ratio=floor)
    for step in range(warmup, TOTAL):
        angle = math.pi * (step - warmup) / (TOTAL - warmup)
        assert found[step] == pytest.approx(floor + (1 - floor) * math.cos(angle / 2) ** 2)
    assert found[warmup + (TOTAL - warmup) // 2] == pytest.approx((1 + floor) / 2)
    assert found[TOTAL:] == pytest.approx([floor] * 5)


@pytest.mark.parametrize("shape", ["constant", "linear", "cosine"])
def test_warm_up_longer_than_the_run(shape):
    assert factors(total=2, lr_scheduler_type=shape, lr_warmup_steps=10)[:3] == [0.1, 0.2, 0.3]


def backend_of(optim: OptimConfig) -> Fsdp2Backend:
    cpu = torch.device("cpu")
    return Fsdp2Backend(
        tiny_qwen2(), BackendConfig(), optim, cpu, grad_clip=1.0, total_optimizer_steps=TOTAL, hf_files={}
    )


def rates(backend: Fsdp2Backend, steps: int) -> list[float]:
    """The rates used by the next `steps` optimizer steps, without gradients; each must be the optimizer's own."""
    found = []
    for _ in range(steps):
        in_optimizer = backend.optimizer.param_groups[0]["lr"]
        found.append(backend.optimizer_step()["lr"])
        assert found[-1] == in_optimizer
    return found


@pytest.mark.parametrize("stop", [0, 1, 2, 7, TOTAL])
@pytest.mark.parametrize("shape", ["constant", "linear", "cosine"])
def test_a_restored_schedule_goes_on_identically(shape, stop):
    optim = OptimConfig(lr=3e-4, lr_scheduler_type=shape, lr_warmup_steps=2, min_lr_ratio=0.1)
    with single_rank():
        whole = backend_of(optim)
        rates(whole, stop)
        state = json.loads(json.dumps(whole.extra_state()))
        restored = backend_of(optim)
        restored.load_extra_state(state)
        rest = rates(whole, TOTAL + 2 - stop)
        assert rates(restored, TOTAL + 2 - stop) == rest
        assert restored.extra_state() == whole.extra_state()
    expected = [3e-4 * learning_rate_factor(optim, step, TOTAL) for step in range(stop, TOTAL + 2)]
    assert rest == pytest.approx(expected)


@pytest.mark.parametrize("shape", ["constant", "linear", "cosine"])
def test_a_changed_rate_and_shape_act_from_the_first_step_after_a_resume(shape):
    """A restored schedule once kept the saved rates (`base_lrs`), while log and checkpoints told the changed ones."""
    changed = OptimConfig(lr=5e-5, lr_scheduler_type=shape, lr_warmup_steps=1, min_lr_ratio=0.3)
    with single_rank():
        saved = backend_of(OptimConfig(lr=3e-4, lr_scheduler_type="cosine", lr_warmup_steps=2))
        rates(saved, 7)
        resumed = backend_of(changed)
        resumed.load_extra_state(json.loads(json.dumps(saved.extra_state())))
        found = rates(resumed, TOTAL - 7)
        assert resumed.extra_state()["lr_scheduler"]["base_lrs"] == [5e-5]
    assert found == [5e-5 * learning_rate_factor(changed, step, TOTAL) for step in range(7, TOTAL)]
