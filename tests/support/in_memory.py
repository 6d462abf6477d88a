"""Makes folders on a tmpfs for tests of snapshots in memory, and runs that take snapshots there."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlhf.checkpoint.start.domains import find_domains
from rlhf.config import Config
from rlhf.ranks.memory_folder import memory_folder
from rlhf.storage.history_file import HistoryMark
from rlhf.storage.layout import HISTORY, scan, step_of
from tests.support.checkpoints import make_config
from tests.support.saving_behind import Run
from tests.support.thread_ranks import make_coordinator

SHM = Path("/dev/shm")


@contextmanager
def memory_base() -> Iterator[Path]:
    """Yield a new folder on this machine's tmpfs; skip the test without a tmpfs."""
    if not SHM.is_dir():
        pytest.skip("needs /dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="rlhf-test-", dir=SHM))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def in_memory(tmp_path: Path, base: Path) -> Config:
    """Return a configuration with a snapshot in `base` after each step, and saves on disk only on request."""
    config = make_config(tmp_path)
    config.checkpoint.memory.freq, config.checkpoint.memory.dir = 1, str(base)
    config.trainer.save_freq = 100
    return config


def folder_of(config: Config) -> Path:
    """Return the folder of the run's snapshots; tests' driver states have the run id "r"."""
    return memory_folder(config.checkpoint.memory.dir, config.run_dir, "r")


def snapshots(config: Config) -> list[int]:
    """Return the steps with a snapshot, newest first."""
    return [step_of(path) or 0 for path in scan(folder_of(config))]


class History:
    """The end of the metric history, as the tracker stores it in the driver state."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / HISTORY

    def record(self, step: int) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step}) + "\n")

    def state_dict(self) -> dict:
        mark = HistoryMark.at_end(self.path)
        return {"run_id": "r", "mark": {"size": mark.size, "tail": mark.tail}}

    def load_state_dict(self, state: dict) -> None:
        pass


class MemoryRun(Run):
    """A rank of a run with a metric history; each step may take a snapshot and save."""

    def __init__(self, rank: int, config: Config) -> None:
        coordinator = make_coordinator()
        config.run_dir.mkdir(parents=True, exist_ok=True)
        coordinator.domains = find_domains(config.run_dir, coordinator)
        super().__init__(rank, config, coordinator)
        self.history = History(config.run_dir)
        if rank == 0:
            self.checkpointer._state.stateful["history"] = self.history

    def train(self, steps: int) -> None:
        """Train `steps` steps like the loop: record, then snapshot and save."""
        for _ in range(steps):
            step = self.step()
            if self.rank == 0:
                self.history.record(step)
            self.checkpointer.maybe_save(step, {"val/accuracy": 0.5})

    def crash(self) -> None:
        """Wait for the snapshot in flight, and leave everything as a crash would."""
        self.checkpointer.finish()
