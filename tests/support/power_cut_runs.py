"""Small runs for power cuts: real start, resume, save, history and journal code around a state of a few tensors.

A run notes each promise when it makes it.
"""

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from rlhf.checkpoint.checkpointer import Checkpointer
from rlhf.checkpoint.commit.identity import Identity
from rlhf.checkpoint.start.domains import find_domains
from rlhf.checkpoint.start.preparation import prepare
from rlhf.checkpoint.state.driver_state import DriverState
from rlhf.checkpoint.state.run_file import read_run_file
from rlhf.checkpoint.state.run_state import RunState
from rlhf.config import Config
from rlhf.config.compare import ResolvedConfig, compare_text
from rlhf.config.resolved import to_yaml
from rlhf.experience.journal import Journal
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.progress_pipe import ProgressDisplay
from rlhf.reward import RewardResult
from rlhf.rollout import Sample
from rlhf.storage.layout import HISTORY, SAMPLES, step_of
from rlhf.tracking import Tracker
from rlhf.tracking.history import History
from rlhf.tracking.run_log import RunLog
from rlhf.tracking.sample_files import ROLLOUT
from tests.support.checkpoints import (
    IDENTITY,
    PlainCarried,
    PlainPart,
    PlainReference,
    PlainRole,
    even_range,
    make_config,
)
from tests.support.recorded_files import Recorder
from tests.support.thread_ranks import make_coordinator

SIZE = 1100  # with its header a little more than one block
UIDS = (4, 5)
SHOWN = 3
"""Samples per step."""


@dataclass(frozen=True)
class Saved:
    """A save with a unique `mark`, the ranks' `states`, and the `history` up to its step."""

    mark: int
    step: int
    states: dict[int, dict[str, Any]]
    history: list[dict]


@dataclass
class Promises:
    """Promises at one point: the next command, and the files and states that it must find."""

    start: "Start"
    allowed: list[Saved] = field(default_factory=list)
    """The newest committed save, and saves begun since."""
    begun: list[Saved] = field(default_factory=list)
    may_be_none: bool = True
    run_id: str | None = None
    kept: set[int] = field(default_factory=set)
    """Marks of saves that were set aside and still exist, under any name."""
    damage: bool = False
    journal: set[tuple[int, int, str]] = field(default_factory=set)
    """Step, prompt, and whether its samples or its rewards were written."""
    copied: Saved | None = None
    """The newest save on the remote."""
    whole: dict[str, Callable[[bytes], bool]] = field(default_factory=dict)
    """Small files, each with a check that an existing file is complete."""
    there: set[str] = field(default_factory=set)
    """Small files that must exist."""

    def apply(self, what: str, value: Any) -> None:
        """Apply a note."""
        if what == "start":
            self.start = value
        elif what == "begun":
            self.allowed = [*self.allowed, value]
            self.begun = [*self.begun, value]
        elif what == "saved":
            steps = [saved.step for saved in self.allowed]
            self.allowed = self.allowed[len(steps) - 1 - steps[::-1].index(value) :]
            self.may_be_none = False
        elif what == "only":  # a different start began from these saves, or from none
            self.allowed, self.may_be_none, self.run_id, self.journal = [*value], not value, None, set()
        elif what == "also":
            self.allowed = [value, *self.allowed]
        elif what == "kept":
            self.kept = self.kept | value
        elif what == "journal":
            self.journal = self.journal | {value}
        elif what == "whole":
            name, content = value
            self.whole = self.whole | {name: content}
        elif what == "there":
            self.there = self.there | {value}
        else:
            assert what in ("run_id", "damage", "copied")
            setattr(self, what, value)


@dataclass(frozen=True)
class Start:
    """A command: the configuration of each rank."""

    configs: tuple[Config, ...]
    journal: bool = False
    _described: dict[int, tuple[ResolvedConfig, Identity]] = field(default_factory=dict)

    @property
    def config(self) -> Config:
        return self.configs[0]

    def described(self, rank: int) -> tuple[ResolvedConfig, Identity]:
        """Return a rank's configuration as in checkpoints, cached because it takes ten times as long as a resume."""
        if rank not in self._described:
            config = self.configs[rank]
            resolved = ResolvedConfig(
                to_yaml(config), cache(lambda stored, release: compare_text(stored, config, release))
            )
            self._described[rank] = resolved, replace(IDENTITY, config_hash=resolved.hash)
        return self._described[rank]


class Book:
    """Notes, each with the number of operations recorded before it.

    Another recorder recorded the first `earlier` operations and noted `saves`.
    """

    def __init__(self, recorder: Recorder, saves: dict[int, Saved] | None = None, earlier: int = 0) -> None:
        self.recorder, self._earlier = recorder, earlier
        self.notes: list[tuple[int, str, Any]] = []
        self.saves = dict(saves or {})

    def note(self, what: str, value: Any = None) -> None:
        with self.recorder.lock:
            self.notes.append((self._earlier + len(self.recorder.ops), what, value))


def promises_at(notes: list[tuple[int, str, Any]], moment: int) -> Promises:
    """Return the promises after `moment` operations. The first note is a start."""
    promises = Promises(notes[0][2])
    for number, what, value in notes:
        if number <= moment:
            promises.apply(what, value)
    return promises


class TinyRun:
    """One rank of a run, started by the real start code, with the loop's `history`.

    `trajectory` distinguishes this start's steps from another start's steps with the same numbers.
    """

    shows = False
    """Whether its steps write samples for users."""

    def __init__(self, start: Start, rank: int = 0, trajectory: int = 0, book: Book | None = None) -> None:
        self.config = config = start.configs[rank]
        self.rank, self.trajectory, self.book = rank, trajectory, book if rank == 0 else None
        self.coordinator: Coordinator = make_coordinator()
        if len({c.run_dir for c in start.configs}) > 1:
            self.coordinator.domains = find_domains(config.run_dir, self.coordinator)
        resolved, identity = start.described(rank)
        prepare(config.run_dir, config.trainer, config.checkpoint, resolved, self.coordinator)
        world = self.coordinator.world_size
        self.run_id = read_run_file(config.run_dir)["run_id"]
        if not config.trainer.overwrite:  # an overwriting start makes a new id each time
            self.note("run_id", self.run_id)
        self.driver, self.part = DriverState(self.run_id, 10, 5.0), PlainPart()
        self.role, self.reference = PlainRole(SIZE, rank, world), PlainReference(SIZE, rank, world)
        self.carried = PlainCarried({"x": torch.zeros(3)})
        tracker = Tracker(config.trainer, config.tracking, {}, config.run_dir, self.run_id) if rank == 0 else None
        self.run_log = RunLog(tracker, ProgressDisplay(), 10)
        parts = {"part": self.part, "reference": self.reference, "history": self.run_log}
        state = RunState({"actor": self.role}, self.driver, parts, self.reference, self.carried)
        self.checkpointer = Checkpointer(
            config.run_dir, config.trainer, config.checkpoint, resolved, identity, self.coordinator, state
        )
        self.resumed = self.checkpointer.resume()
        self._follow()
        self.journal = Journal(config.run_dir, self.run_id, "scores", self.coordinator) if start.journal else None

    def note(self, what: str, value: Any) -> None:
        if self.book is not None:
            self.book.note(what, value)

    def _follow(self) -> None:
        self.last: str | None = None
        self.run_log.start(self.driver.step, resumed=self.resumed)
        self.history = self.recorded()

    def recorded(self) -> list[dict]:
        """Return the metric history on disk."""
        return list(History(self.config.run_dir / HISTORY).records())

    def roll_back(self, trajectory: int) -> None:
        """Roll back to the newest checkpoint, in this process."""
        self.trajectory = trajectory
        self.resumed = self.checkpointer.resume()
        assert self.resumed
        self._follow()

    def step(self) -> None:
        """Run and record one training step."""
        step = self.driver.step + 1
        if self.journal is not None:
            self.fill_journal(step)
        self.driver.step = step
        seed = 1000 * self.trajectory + step
        world = self.coordinator.world_size
        self.role.weight.copy_(even_range(SIZE, self.rank, world, seed)[0])
        self.role.moment.copy_(even_range(SIZE, self.rank, world, 500 + seed)[0])
        self.role.position = seed
        self.part.state["count"] = seed
        self.carried.held[0]["x"].fill_(seed)
        if step % 2:
            self.reference.update(step)
        metrics = {"loss": seed / 7}
        if self.shows:
            self.run_log.show([{"split": ROLLOUT, "response": str(seed)} for _ in range(SHOWN)])
            name = f"rlhf/default/{SAMPLES}/step_{step}.jsonl"
            self.note("whole", (name, lambda content: content.count(b"\n") == SHOWN and content.endswith(b"}\n")))
        self.history.append({"step": step, **metrics})
        self.run_log.step(step, metrics)
        self.last = str(seed)

    def fill_journal(self, step: int) -> None:
        assert self.journal is not None
        self.journal.begin(step, step - 1, self.last)
        for uid in UIDS:
            if self.journal.samples([uid]) is None:
                self.journal.add_samples({uid: samples_of(uid, step)})
            self.note("journal", (step, uid, "samples"))
            if self.journal.results([uid]) is None:
                self.journal.add_results({uid: results_of(uid, step)})
            self.note("journal", (step, uid, "results"))

    def save(self) -> None:
        """Save this step, and note the outcome of this save and the previous save."""
        step = self.driver.step
        self.part.state["mark"] = None if self.book is None else len(self.book.saves) + 1
        self.part.state["mark"] = mark = self.coordinator.broadcast(self.part.state["mark"])
        states = [pickle.loads(state) for state in self.coordinator.all_gather(pickle.dumps(self.everything()))]
        if self.book is not None:
            self.book.saves[mark] = Saved(mark, step, dict(enumerate(states)), list(self.history))
            self.book.note("begun", self.book.saves[mark])
        self._saved(self.checkpointer.save(step, {"val/accuracy": 0.5}))

    def finish(self) -> None:
        """Wait for the save in flight and for deletions."""
        self._saved(self.checkpointer.finish())
        with self.checkpointer.committing():  # waits for copies
            pass
        self.run_log.close()

    def _saved(self, result: Any) -> None:
        if result is not None:
            self.note("saved", step_of(result.path))

    def train(self, steps: int, every: int = 1) -> None:
        """Run `steps` steps and save each `every`-th."""
        for _ in range(steps):
            self.step()
            if self.driver.step % every == 0:
                self.save()

    def everything(self) -> dict[str, Any]:
        """Return all state that a resume must restore."""
        carried = self.carried.held[0] if self.carried.held else {}
        return {
            "weight": self.role.weight.clone(),
            "moment": self.role.moment.clone(),
            "position": self.role.position,
            "reference": self.reference.weight.clone(),
            "reference_at": self.reference.updated_at,
            "part": dict(self.part.state),
            "carried": {name: tensor.clone() for name, tensor in carried.items()},
            "step": self.driver.step,
        }


def samples_of(uid: int, step: int) -> list[Sample]:
    return [Sample.of(uid, i, [7, uid, step], [-0.5, -uid / 3, -0.1], "stop") for i in range(2)]


def results_of(uid: int, step: int) -> list[RewardResult]:
    return [RewardResult(uid / 7 + i, {"sums": float(step)}) for i in range(2)]


def tiny_config(folder: Path, **settings: Any) -> Config:
    """Return the configuration of a run below `folder` that keeps all checkpoints and saves on request."""
    config = make_config(folder)
    config.checkpoint.max_to_keep = None
    config.trainer.save_freq = 1
    for name, value in settings.items():
        section, _, key = name.partition("__")
        setattr(getattr(config, section), key, value)
    return config
