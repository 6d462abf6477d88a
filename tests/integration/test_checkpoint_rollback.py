"""A resume in a running process: it restores the newest checkpoint bit for bit, and training goes on from there."""

import random
import tempfile
from pathlib import Path

import pytest
import torch

from rlhf.config import Config
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.gloo import GlooTransport
from rlhf.ranks.rng import rng_state, seed_everything
from rlhf.storage.layout import scan, step_dir, step_of
from tests.support.checkpoints import (
    PlainCarried,
    PlainPart,
    PlainReference,
    equal_bits,
    flip_bit,
    make_backend,
    make_checkpointer,
    make_config,
    make_driver,
    run_ranks,
    whole_state,
)

DEADLINE_S = 90


class Run:
    """An actor and a critic under FSDP2, and all other state that a checkpoint restores. `step` changes all of it."""

    def __init__(self, rank: int, config: Config) -> None:
        coordinator = Coordinator(GlooTransport())
        seed_everything(3, rank)
        self.rank, self.driver, self.part = rank, make_driver(), PlainPart()
        self.roles = {"actor": make_backend(1), "critic": make_backend(2)}
        self.reference = PlainReference(100, rank, coordinator.world_size)
        self.carried = PlainCarried()
        self.checkpointer = make_checkpointer(
            config,
            self.roles,
            coordinator=coordinator,
            driver=self.driver,
            parts={"part": self.part, "reference": self.reference},
            reference=self.reference,
            carried=self.carried,
        )

    def step(self) -> None:
        self.driver.finish_step(10, 2, 0.5, 0.25)
        for backend in self.roles.values():
            ids = torch.randint(500, (2, 5))
            noise = 1 + 0.1 * random.random()
            backend.backward(backend.module(input_ids=ids).logits.square().mean() * noise)
            backend.optimizer_step()
        self.part.state["count"] += 1
        if self.driver.step % 2 == 0:
            self.reference.update(self.driver.step)
        # Of two ranks, one holds nothing in two of three steps. A single rank holds nothing in each third step.
        self.carried.held = [] if self.driver.step % 3 == self.rank else [{"tokens": torch.randint(500, (7,))}]

    def everything(self) -> dict:
        return {
            **{name: whole_state(backend) for name, backend in self.roles.items()},
            "rng": rng_state(),
            "driver": self.driver.state_dict(),
            "part": dict(self.part.state),
            "reference": {"weight": self.reference.weight.clone(), "updated_at": self.reference.updated_at},
            "carried": {str(number): dict(tensors) for number, tensors in enumerate(self.carried.held)},
        }


def roll_back(rank: int, config: Config, at: int) -> list[str]:
    """Save at step `at`, then train three steps and roll back, three times. Return what differed."""
    run, wrong = Run(rank, config), []
    for _ in range(at):
        run.step()
    assert run.checkpointer.save(at) is not None
    saved = run.everything()
    ends = []
    for _ in range(3):
        for _ in range(3):
            run.step()
        ends.append(run.everything())
        if equal_bits(ends[-1]["actor"]["model"], saved["actor"]["model"]):
            wrong.append("the steps changed nothing")
        assert run.checkpointer.resume() is True
        now = run.everything()
        wrong += [f"{key} after the rollback" for key in saved if not equal_bits(now[key], saved[key])]
    wrong += [f"{key} at the end" for end in ends for key in end if not equal_bits(end[key], ends[0][key])]
    # The current step is already saved. The save of the next step is new, and links the reference of the current
    # step.
    assert run.checkpointer.save(at) is None
    run.driver.step += 1
    result = run.checkpointer.save(at + 1)
    assert result is not None
    same_file = (result.path / "ref/model/index.safetensors").samefile(
        step_dir(config.run_dir, at) / "ref/model/index.safetensors"
    )
    return wrong + ([] if same_file else ["the reference was written again"])


@pytest.mark.parametrize("at", [0, 3, 4])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_roll_back_restores_every_bit_and_leads_to_the_same_end(tmp_path, world_size, at):
    # Promise 16.
    config = make_config(tmp_path)
    results = run_ranks(world_size, roll_back, config, at, deadline_s=DEADLINE_S, join=tmp_path / "join")
    assert results == [[]] * world_size


def roll_back_past_damage(rank: int, config: Config) -> tuple[bool, int, bool]:
    run = Run(rank, config)
    run.step()
    run.checkpointer.save(1)
    first = run.everything()
    run.step()
    run.checkpointer.save(2)
    if rank == 0:
        flip_bit(step_dir(config.run_dir, 2) / "critic/optimizer/rank_00000.safetensors", 5000)
    run.step()
    return run.checkpointer.resume(), run.driver.step, equal_bits(run.everything(), first)


def test_a_roll_back_skips_a_damaged_checkpoint(tmp_path):
    config = make_config(tmp_path)
    results = run_ranks(2, roll_back_past_damage, config, deadline_s=DEADLINE_S, join=tmp_path / "join")
    # Both roles fall back to step 1, although only the critic's file was damaged.
    assert results == [(True, 1, True)] * 2
    assert [step_of(path) for path in scan(config.run_dir)] == [1]


def no_checkpoint(rank: int, config: Config) -> bool:
    run = Run(rank, config)
    run.step()
    before = run.everything()
    assert run.checkpointer.resume() is False
    return equal_bits(run.everything(), before)


def test_a_roll_back_without_a_checkpoint_changes_nothing(tmp_path):
    join = Path(tempfile.mkdtemp(dir=tmp_path))
    assert run_ranks(1, no_checkpoint, make_config(tmp_path), deadline_s=DEADLINE_S, join=join) == [True]
