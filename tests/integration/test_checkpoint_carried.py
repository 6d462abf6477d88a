"""Tensors of carried-over samples: they are part of every commit, and a resume distributes them over any number of
ranks."""

import logging
import tempfile
from pathlib import Path

import pytest
import torch

from rlhf.config import Config
from rlhf.config.schema.checkpoint import CONTENTS
from rlhf.storage.layout import step_dir
from tests.support.checkpoints import (
    IDENTITY,
    PlainCarried,
    PlainRole,
    equal_bits,
    files_of,
    make_checkpointer,
    make_config,
    resume,
    run_ranks,
)
from tests.support.thread_ranks import make_coordinator, run_thread_ranks
from tests.support.verified import verify

DEADLINE_S = 90


@pytest.fixture
def processes(tmp_path):
    def run(world_size: int, function, *arguments) -> list:
        join = Path(tempfile.mkdtemp(dir=tmp_path))
        return run_ranks(world_size, function, *arguments, deadline_s=DEADLINE_S, join=join)

    return run


def some(rank: int) -> dict[str, torch.Tensor]:
    """Return the tensors that rank `rank` carries over: all types of samples, odd sizes, and empty tensors."""
    generator = torch.Generator().manual_seed(rank)
    return {
        "tokens": torch.randint(100, (rank + 1, 3), generator=generator),
        "log_probs": torch.randn(rank, generator=generator),
        "truncated": torch.arange(5) % 2 == 0,
        "uid": torch.tensor(rank),
    }


def save(rank: int, config: Config, holders: list[int]) -> None:
    coordinator = make_coordinator()
    carried = PlainCarried(some(rank) if rank in holders else None)
    role = PlainRole(rank=rank, world_size=coordinator.world_size)
    make_checkpointer(config, role, 3, coordinator, carried=carried).save(3)


def load(rank: int, config: Config) -> list[dict[str, torch.Tensor]]:
    """Resume with old carried-over tensors in memory. Return the tensors after the resume."""
    coordinator, carried = make_coordinator(), PlainCarried({"old": torch.ones(1)})
    role = PlainRole(rank=rank, world_size=coordinator.world_size)
    assert resume(config, role, coordinator, carried=carried) == 3
    return carried.held


@pytest.mark.parametrize(
    ("writers", "holders", "readers", "expected"),
    [
        (2, [0, 1], 2, [[0], [1]]),
        (2, [1], 2, [[], [1]]),
        (2, [], 2, [[], []]),
        (1, [0], 1, [[0]]),
        (2, [0, 1], 1, [[0, 1]]),
        (1, [0], 2, [[0], []]),
        (3, [0, 1, 2], 2, [[0, 2], [1]]),
        (3, [0, 2], 2, [[0, 2], []]),
    ],
)
def test_loading_replaces_each_ranks_carried_samples(tmp_path, processes, writers, holders, readers, expected):
    config = make_config(tmp_path)
    # One case runs over gloo: a rank carries nothing, and the number of ranks changes.
    ranks = processes if (writers, holders) == (3, [0, 2]) else run_thread_ranks
    ranks(writers, save, config, holders)
    files = {f"driver_state/rank_{rank:05d}.safetensors" for rank in holders}
    assert {name for name in files_of(step_dir(config.run_dir, 3)) if name.startswith("driver_state/")} == files
    assert files <= verify(step_dir(config.run_dir, 3)).files.keys()
    for held, wanted in zip(ranks(readers, load, config), expected, strict=True):
        assert len(held) == len(wanted)
        assert all(equal_bits(tensors, some(rank)) for tensors, rank in zip(held, wanted, strict=True))


@pytest.mark.parametrize("item", CONTENTS)
def test_carried_samples_are_in_every_checkpoint(tmp_path, item):
    config = make_config(tmp_path)
    config.checkpoint.contents = [item]
    save(0, config, [0])
    assert "driver_state/rank_00000.safetensors" in verify(step_dir(config.run_dir, 3)).files


def test_a_run_without_carried_samples_warns_of_those_it_drops(tmp_path, caplog):
    config = make_config(tmp_path)
    make_checkpointer(config, PlainRole(), 3, carried=PlainCarried(some(0))).save(3)
    with caplog.at_level(logging.WARNING, logger="rlhf"):
        assert resume(config, PlainRole()) == 3
    assert "has samples carried over to later steps" in caplog.text


@pytest.mark.parametrize(
    ("section", "setting", "kept"),
    [
        ("rollout", "temperature", False),
        ("env", "reward_weight", False),
        ("reward", "failed_score", False),
        ("actor", "entropy_coeff", True),
    ],
)
def test_samples_of_other_settings_are_dropped_when_a_change_is_allowed(tmp_path, caplog, section, setting, kept):
    config = make_config(tmp_path)
    make_checkpointer(config, PlainRole(), 2, carried=PlainCarried(some(0))).save(2)
    setattr(getattr(config, section), setting, 0.25)
    config.trainer.allow_config_change = True
    carried = PlainCarried()
    assert resume(config, PlainRole(), carried=carried) == 2
    assert bool(carried.held) == kept
    assert ("samples for later steps, from other settings or files; they are dropped" in caplog.text) == (not kept)


@pytest.mark.parametrize(("setting", "kept"), [("reward.functions", False), ("env.classes", False), (None, True)])
def test_samples_of_other_files_are_dropped_when_a_change_is_allowed(tmp_path, setting, kept):
    config = make_config(tmp_path)
    files = IDENTITY.fingerprints | {"reward.functions": "a" * 32, "env.classes": "a" * 32}
    make_checkpointer(config, PlainRole(), 2, fingerprints=files, carried=PlainCarried(some(0))).save(2)
    config.trainer.allow_config_change = True
    carried = PlainCarried()
    others = files if setting is None else files | {setting: "b" * 32}
    assert resume(config, PlainRole(), None, others, carried=carried) == 2
    assert bool(carried.held) == kept


class Prompts:
    """A stream of prompts. Only the hashes in its state matter here."""

    def __init__(self, rows: str, tokens: str):
        self.state = {"consumed": 0, "fingerprint": rows, "tokens_fingerprint": tokens}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


@pytest.mark.parametrize(("rows", "tokens", "kept"), [("a", "a", True), ("b", "a", False), ("a", "b", False)])
def test_samples_of_other_prompts_are_dropped(tmp_path, rows, tokens, kept):
    """The prompt file keeps its path, but its content was edited."""
    config = make_config(tmp_path)
    before = {"data": Prompts("a", "a")}
    make_checkpointer(config, PlainRole(), 2, parts=before, carried=PlainCarried(some(0))).save(2)
    carried = PlainCarried()
    assert resume(config, PlainRole(), parts={"data": Prompts(rows, tokens)}, carried=carried) == 2
    assert bool(carried.held) == kept
