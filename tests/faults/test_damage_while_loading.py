"""Damage that one rank meets while it loads: all ranks fall back together, at the same and at another number of ranks."""

import tempfile
from pathlib import Path

import pytest

from rlhf.config import Config
from rlhf.errors import UserError
from rlhf.ranks.coordinator import Coordinator
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

DEADLINE_S = 90
# Of float32: five blocks of 4 MiB on one rank, so that ranges of other ranks' files are some blocks and not others.
SIZE = 5 << 20
CONTENTS = ["model", "optimizer", "extra", "hf_model"]


class Run:
    """An actor, a part of the driver state and something carried over, all of which follow from `seed`."""

    def __init__(self, config: Config, rank: int, seed: int) -> None:
        coordinator = Coordinator()
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
        """The step that all of the state is of, None when it is not of one step."""
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
        # Only tensors may have been touched.
        assert (run.driver.step, run.part.state, run.role.position) == (0, {"count": 0}, 0)
        return str(error)
    return run.step_if_whole()


@pytest.fixture
def ranks(tmp_path):
    def run(world_size: int, function, *arguments) -> list:
        join = Path(tempfile.mkdtemp(dir=tmp_path))
        return run_ranks(world_size, function, *arguments, deadline_s=DEADLINE_S, join=join)

    return run


@pytest.fixture
def config(tmp_path) -> Config:
    config = make_config(tmp_path)
    config.checkpoint.contents = list(CONTENTS)
    config.checkpoint.max_to_keep = None
    return config


@pytest.mark.parametrize(("writers", "readers"), [(1, 1), (2, 2), (1, 2), (2, 1), (2, 3)])
def test_all_ranks_fall_back_together_whoever_reads_the_damage(config, ranks, writers, readers):
    ranks(writers, save, config, [1, 2, 3, 4, 5])
    assert ranks(readers, resume, config) == [5] * readers
    # The first and last bytes of tensors, which only the first or the last rank reads; and what every rank reads, or none.
    damage = {
        5: ("actor/model/rank_00000.safetensors", 8 * 600),
        4: (f"actor/optimizer/rank_{writers - 1:05d}.safetensors", -1),
        3: ("actor/optimizer/index.json", 40),
        2: ("actor/huggingface/model.safetensors", -1),
    }
    for step, (name, bit) in damage.items():
        path = step_dir(config.run_dir, step) / name
        flip_bit(path, bit % (8 * path.stat().st_size))
    assert ranks(readers, resume, config) == [1] * readers
    assert [path.name for path in scan(config.run_dir)] == ["global_step_1"]


def test_every_rank_is_told_when_nothing_is_left(config, ranks):
    ranks(2, save, config, [1])
    flip_bit(step_dir(config.run_dir, 1) / "actor/model/rank_00001.safetensors", 8 * 600)
    texts = ranks(2, resume, config)
    assert all("Every checkpoint in" in text and "global_step_1.damaged-1" in text for text in texts)


@pytest.mark.parametrize("name", ["actor/model/rank_00001.safetensors", "rng/rank_00001.safetensors"])
def test_a_file_that_is_gone_or_cut_is_damage_to_all(config, ranks, name):
    ranks(2, save, config, [1, 2, 3])
    (step_dir(config.run_dir, 3) / name).unlink()
    path = step_dir(config.run_dir, 2) / name
    path.write_bytes(path.read_bytes()[:-1])
    assert ranks(2, resume, config) == [1, 1]
