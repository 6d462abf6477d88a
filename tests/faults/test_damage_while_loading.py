"""Damage that one rank finds while it loads: all ranks fall back together, also on another number of ranks than
saved."""

import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rlhf.config import Config
from rlhf.errors import UserError
from rlhf.storage.layout import scan, step_dir
from tests.support.checkpoints import (
    PlainCarried,
    PlainPart,
    PlainRole,
    flip_bit,
    make_checkpointer,
    make_config,
    make_driver,
    run_ranks,
)
from tests.support.thread_ranks import make_coordinator, run_thread_ranks

DEADLINE_S = 90
# Five blocks of 4 MiB in float32: a rank that reads a range of another rank's file needs only some of the blocks.
SIZE = 5 << 20
CONTENTS = ["model", "optimizer", "extra", "hf_model"]


class Run:
    """An actor, a part of the driver state and carried-over tensors, all determined by `seed`."""

    def __init__(self, config: Config, rank: int, seed: int) -> None:
        coordinator = make_coordinator()
        self.role = PlainRole(SIZE, rank, coordinator.world_size, seed)
        self.driver, self.part, self.carried = make_driver(seed), PlainPart(seed), PlainCarried()
        self.checkpointer = make_checkpointer(
            config,
            self.role,
            coordinator=coordinator,
            driver=self.driver,
            parts={"part": self.part},
            carried=self.carried,
        )

    def step_if_whole(self) -> int | None:
        """Return the step of the state; None if parts are of different steps."""
        step = self.driver.step
        like = PlainRole(self.role.shape[0], 0, 1, step)
        start, stop = self.role.start, self.role.start + len(self.role.weight)
        same = self.role.weight.equal(like.weight[start:stop]) and self.role.moment.equal(like.moment[start:stop])
        return step if same and self.role.position == step and self.part.state == {"count": step} else None


def save(rank: int, config: Config, steps: list[int]) -> None:
    for step in steps:
        Run(config, rank, step).checkpointer.save(step)


def resume(rank: int, config: Config) -> int | str | None:
    run = Run(config, rank, 0)
    try:
        assert run.checkpointer.resume() is True
    except UserError as error:
        # Only tensors may have changed.
        assert (run.driver.step, run.part.state, run.role.position) == (0, {"count": 0}, 0)
        return str(error)
    return run.step_if_whole()


def configuration(folder: Path) -> Config:
    config = make_config(folder)
    config.checkpoint.contents = list(CONTENTS)
    config.checkpoint.max_to_keep = None
    return config


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Callable[[int], Path]:
    """A function that returns the run directory of `writers` ranks with checkpoints of five steps. Tests do not
    change it."""

    @functools.cache
    def by(writers: int) -> Path:
        config = configuration(tmp_path_factory.mktemp(f"original_{writers}"))
        run_thread_ranks(writers, save, config, [1, 2, 3, 4, 5])
        return config.run_dir

    return by


@pytest.fixture
def saved(original, tmp_path) -> Callable[..., Config]:
    """A run with some of these checkpoints. Files are links to `original` until `own` copies them."""

    def by(writers: int, *steps: int) -> Config:
        config = configuration(tmp_path)
        config.run_dir.mkdir(parents=True)
        for step in steps:
            source = step_dir(original(writers), step)
            shutil.copytree(source, step_dir(config.run_dir, step), copy_function=os.link)
        return config

    return by


def own(path: Path) -> Path:
    """Replace `path` by a copy that no other run shares."""
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("writers", "readers", "in_processes"),
    [(1, 1, False), (2, 2, False), (1, 2, False), (2, 1, False), (2, 3, True)],
)
def test_all_ranks_fall_back_together_if_one_rank_reads_damage(tmp_path, saved, writers, readers, in_processes):
    config = saved(writers, 1, 2, 3, 4, 5)
    assert run_thread_ranks(readers, resume, config) == [5] * readers
    # Bytes near the start of the weights and at the end of the optimizer, which only the first or the last rank reads.
    # Then a file that all ranks read, and a file that no rank reads.
    damage = {
        5: ("actor/model/rank_00000.safetensors", 8 * 600),
        4: (f"actor/optimizer/rank_{writers - 1:05d}.safetensors", -1),
        3: ("actor/optimizer/index.safetensors", 40),
        2: ("actor/huggingface/model.safetensors", -1),
    }
    for step, (name, bit) in damage.items():
        path = own(step_dir(config.run_dir, step) / name)
        flip_bit(path, bit % (8 * path.stat().st_size))
    if in_processes:
        resumed = run_ranks(readers, resume, config, deadline_s=DEADLINE_S, join=tmp_path / "join")
    else:
        resumed = run_thread_ranks(readers, resume, config)
    assert resumed == [1] * readers
    assert [path.name for path in scan(config.run_dir)] == ["global_step_1"]


def test_an_error_of_the_device_does_not_condemn_the_checkpoint(saved, monkeypatch):
    config = saved(1, 1)

    def fail(state: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr("rlhf.checkpoint.load.restoring.set_rng_state", fail)
    with pytest.raises(torch.AcceleratorError):
        resume(0, config)
    assert [path.name for path in scan(config.run_dir)] == ["global_step_1"]


def test_every_rank_raises_an_error_if_all_checkpoints_are_damaged(saved):
    config = saved(2, 1)
    flip_bit(own(step_dir(config.run_dir, 1) / "actor/model/rank_00001.safetensors"), 8 * 600)
    texts = run_thread_ranks(2, resume, config)
    assert all("Every checkpoint in" in text and "global_step_1.damaged-1" in text for text in texts)


@pytest.mark.parametrize("name", ["actor/model/rank_00001.safetensors", "rng/rank_00001.safetensors"])
def test_a_missing_or_truncated_file_is_damage_on_all_ranks(saved, name):
    config = saved(2, 1, 2, 3)
    (step_dir(config.run_dir, 3) / name).unlink()
    path = own(step_dir(config.run_dir, 2) / name)
    path.write_bytes(path.read_bytes()[:-1])
    assert run_thread_ranks(2, resume, config) == [1, 1]
