"""Shares parts of tests of background saves: state that changes in place, and how to block the writing thread."""

import threading
from pathlib import Path
from typing import Any

import torch

from rlhf.checkpoint.checkpointer import Checkpointer
from rlhf.config import Config
from rlhf.ranks.coordinator import Coordinator
from rlhf.storage.layout import scan, step_of
from tests.support.checkpoints import (
    PlainCarried,
    PlainPart,
    PlainReference,
    PlainRole,
    even_range,
    make_checkpointer,
    make_config,
    make_driver,
    run_ranks,
)
from tests.support.thread_ranks import in_front, make_coordinator, subscribe

SIZE = 100_000
DEADLINE_S = 90


def saving_behind(folder: Path) -> Config:
    """Return a configuration with background saves of all contents on request."""
    config = make_config(folder)
    config.checkpoint.async_save = True
    config.checkpoint.contents = ["model", "optimizer", "extra", "hf_model"]
    config.trainer.save_freq = 1000
    return config


class Blocker:
    """Blocks the writing thread at `event`, until the training thread waits for it or `release` is called."""

    def __init__(self, event: str = "commit.fsync") -> None:
        self._event, self._gate, self.there = event, threading.Event(), threading.Event()
        subscribe(self._listen)

    def release(self) -> None:
        self._gate.set()

    def _listen(self, event: str) -> None:
        if in_front():
            if event == "commit.wait":
                self.release()
        elif event == self._event:
            self.there.set()
            assert self._gate.wait(DEADLINE_S)


class Run:
    """A rank's saved state; `step` changes it in place, the reference only at odd steps."""

    def __init__(self, rank: int, config: Config, coordinator: Coordinator | None = None) -> None:
        self.coordinator = coordinator or make_coordinator()
        self.world = self.coordinator.world_size
        self.rank, self.driver, self.part = rank, make_driver(), PlainPart()
        self.role = PlainRole(SIZE, rank, self.world)
        self.reference = PlainReference(SIZE, rank, self.world)
        self.carried = PlainCarried({"x": torch.zeros(3)})
        self.checkpointer: Checkpointer = make_checkpointer(
            config,
            self.role,
            coordinator=self.coordinator,
            driver=self.driver,
            parts={"part": self.part, "reference": self.reference},
            reference=self.reference,
            carried=self.carried,
        )

    def step(self) -> int:
        self.driver.step += 1
        seed = self.driver.step
        self.role.weight.copy_(even_range(SIZE, self.rank, self.world, seed)[0])
        self.role.moment.copy_(even_range(SIZE, self.rank, self.world, 1000 + seed)[0])
        self.role.position = seed
        self.part.state["count"] = seed
        self.carried.held[0]["x"].fill_(seed)
        if seed % 2:
            self.reference.update(seed)
        return seed

    def everything(self) -> dict:
        return {
            "weight": self.role.weight.clone(),
            "moment": self.role.moment.clone(),
            "position": self.role.position,
            "reference": self.reference.weight.clone(),
            "part": dict(self.part.state),
            "carried": self.carried.held[0]["x"].clone(),
            "driver": self.driver.state_dict(),
        }


def published(config: Config) -> list[int]:
    """Return the steps with a checkpoint, newest first."""
    return [step_of(path) or 0 for path in scan(config.run_dir)]


def on_ranks(tmp_path: Path, world_size: int, function, *arguments: Any) -> list:
    """Return the results of `function(rank, *arguments)` on `world_size` real ranks."""
    join = tmp_path / f"join_{len(list(tmp_path.iterdir()))}"
    return run_ranks(world_size, function, *arguments, deadline_s=DEADLINE_S, join=join)
