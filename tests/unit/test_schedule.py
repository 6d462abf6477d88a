"""The learning rate at every optimizer step, and that a restored schedule goes on as if nothing had happened."""

import json
import math
from dataclasses import replace

import pytest
import torch

from rlhf.backends.fsdp2 import Fsdp2Backend
from rlhf.backends.training import Training, learning_rate_factor
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
    assert drops == pytest.approx([(1 - floor) / (TOTAL - warmup)] * (TOTAL - warmup), rel=1e-12)
    assert found[TOTAL:] == [floor] * 5


@pytest.mark.parametrize("floor", [0.0, 0.1])
@pytest.mark.parametrize("warmup", [0, 4])
def test_cosine(warmup, floor):
    found = factors(lr_scheduler_type="cosine", lr_warmup_steps=warmup, min_lr_ratio=floor)
    for step in range(warmup, TOTAL):
        angle = math.pi * (step - warmup) / (TOTAL - warmup)
        assert found[step] == pytest.approx(floor + (1 - floor) * math.cos(angle / 2) ** 2, rel=1e-12)
    assert found[warmup + (TOTAL - warmup) // 2] == pytest.approx((1 + floor) / 2, rel=1e-12)
    assert found[TOTAL:] == pytest.approx([floor] * 5, rel=1e-12)


@pytest.mark.parametrize("shape", ["constant", "linear", "cosine"])
def test_warm_up_longer_than_the_run(shape):
    assert factors(total=2, lr_scheduler_type=shape, lr_warmup_steps=10)[:3] == [0.1, 0.2, 0.3]


def backend_of(optim: OptimConfig) -> Fsdp2Backend:
    cpu = torch.device("cpu")
    return Fsdp2Backend(tiny_qwen2(), BackendConfig(), cpu, Training(optim, grad_clip=1.0, total_optimizer_steps=TOTAL))


def rates(backend: Fsdp2Backend, steps: int) -> list[float]:
    """Take `steps` optimizer steps, without a backward pass. Return their rates, which must be the optimizer's."""
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
    assert rest == pytest.approx(expected, rel=1e-12)


UPDATES = 3
BY_TRAINING_STEPS = OptimConfig(
    lr=3e-4,
    lr_scheduler_type="cosine",
    lr_scheduler_interval="training_step",
    lr_warmup_steps=2,
    min_lr_ratio=0.1,
    weight_decay=0.0,
)
BY_OPTIMIZER_STEPS = replace(BY_TRAINING_STEPS, lr_scheduler_interval="optimizer_step")


def in_training_steps(optim: OptimConfig = BY_TRAINING_STEPS) -> Fsdp2Backend:
    """Return the backend of a run of `TOTAL` training steps with `UPDATES` optimizer steps each."""
    options = {"grad_clip": 1.0, "total_optimizer_steps": TOTAL * UPDATES, "updates_per_step": UPDATES}
    return Fsdp2Backend(tiny_qwen2(), BackendConfig(), torch.device("cpu"), Training(optim, **options))


def by_hand(step: int) -> float:
    """Return the rate of `BY_TRAINING_STEPS` in a training step, by its definition."""
    if step < 2:
        return 3e-4 * (step + 1) / 2
    angle = math.pi * min(1.0, (step - 2) / (TOTAL - 2))
    return 3e-4 * (0.1 + 0.9 * math.cos(angle / 2) ** 2)


def training_step(backend: Fsdp2Backend, bad: tuple[int, ...] = ()) -> list[float]:
    """Return the rates of a training step's optimizer steps; the `bad` ones have a gradient that is not finite."""
    found = []
    for update in range(UPDATES):
        if update in bad:
            for parameter in backend.module.parameters():
                parameter.grad = torch.full_like(parameter, math.nan)
        found += rates(backend, 1)
    backend.end_update()
    return found


def test_a_schedule_of_training_steps_is_constant_within_them():
    with single_rank():
        backend = in_training_steps()
        for step in range(TOTAL + 2):
            assert training_step(backend) == pytest.approx([by_hand(step)] * UPDATES, rel=1e-12)
        assert backend.extra_state()["steps_taken"] == {"optimizer_step": 3 * (TOTAL + 2), "training_step": TOTAL + 2}


def test_a_training_step_counts_once_if_an_optimizer_step_was_taken():
    with single_rank():
        backend = in_training_steps()
        training_step(backend, bad=(0, 2))
        training_step(backend, bad=(0, 1, 2))
        backend.end_update()  # for a batch that was rejected before its first step
        assert backend.extra_state()["steps_taken"] == {"optimizer_step": 1, "training_step": 1}
        assert training_step(backend) == [by_hand(1)] * UPDATES


@pytest.mark.parametrize("stop", [0, 1, 2, 9])
@pytest.mark.parametrize(
    ("before", "after"),
    [(a, b) for a in (0, 1) for b in (0, 1)],
    ids=["optimizer", "to_training", "to_optimizer", "training"],
)
def test_a_resume_goes_on_in_either_interval(before, after, stop):
    """A resume may change the interval. The rate goes on as if the new interval had always been
    set, despite skipped steps."""
    intervals = BY_OPTIMIZER_STEPS, BY_TRAINING_STEPS

    def walk(backend: Fsdp2Backend, *steps: int) -> list[list[float]]:
        return [training_step(backend, bad=(1,) if step == 1 else ()) for step in steps]

    with single_rank():
        saved, whole = in_training_steps(intervals[before]), in_training_steps(intervals[after])
        walk(saved, *range(stop))
        walk(whole, *range(stop))
        resumed = in_training_steps(intervals[after])
        resumed.load_extra_state(json.loads(json.dumps(saved.extra_state())))
        rest = range(stop, stop + 4)
        assert walk(resumed, *rest) == walk(whole, *rest)
        assert resumed.extra_state() == whole.extra_state()


def test_a_roll_back_from_within_a_training_step_leaves_no_trace():
    with single_rank():
        backend, plain = in_training_steps(), in_training_steps()
        for each in (backend, plain):
            training_step(each)
        state = json.loads(json.dumps(backend.extra_state()))
        training_step(backend)
        rates(backend, 2)
        backend.load_extra_state(state)
        backend.end_update()
        assert backend.extra_state() == plain.extra_state()
        assert training_step(backend) == training_step(plain)


@pytest.mark.parametrize("shape", ["constant", "linear", "cosine"])
def test_a_changed_rate_and_shape_act_from_the_first_step_after_a_resume(shape):
    """A restored schedule once kept the saved rates (`base_lrs`), while log and checkpoints had the changed ones."""
    changed = OptimConfig(lr=5e-5, lr_scheduler_type=shape, lr_warmup_steps=1, min_lr_ratio=0.3)
    with single_rank():
        saved = backend_of(OptimConfig(lr=3e-4, lr_scheduler_type="cosine", lr_warmup_steps=2))
        rates(saved, 7)
        resumed = backend_of(changed)
        resumed.load_extra_state(json.loads(json.dumps(saved.extra_state())))
        found = rates(resumed, TOTAL - 7)
        assert resumed.extra_state()["lr_scheduler"]["base_lrs"] == [5e-5]
    assert found == [5e-5 * learning_rate_factor(changed, step, TOTAL) for step in range(7, TOTAL)]
