"""TensorBoard's own reader sees every step once and in order after kills, lost tails and repeated steps."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf.config import TrackingConfig, TrainerConfig
from rlhf.tracking import History, Tracker
from rlhf.tracking.history import Record
from tests.support.rounding import FLOAT32
from tests.support.tracked import tensorboard_curves, tensorboard_tables
from tests.support.tracking_run import metrics

pytest.importorskip("tensorboard")


def launch(run_dir: Path, *arguments: str) -> int:
    command = [
        sys.executable,
        "-m",
        "tests.support.tracking_run",
        str(run_dir),
        "tensorboard",
        "offline",
        *arguments,
    ]
    return subprocess.run(command, timeout=120).returncode


def expected(steps: range) -> dict[str, list[tuple[int, float]]]:
    curves: dict[str, list[tuple[int, float]]] = {}
    for step in steps:
        for name, value in metrics(step).items():
            curves.setdefault(name, []).append((step, pytest.approx(value, rel=FLOAT32, abs=0)))
    return curves


def test_kills_leave_every_step_once_and_in_order(tmp_path: Path) -> None:
    # The kill comes before any checkpoint, so the next launch starts at step 0 again.
    assert launch(tmp_path, "none", "20", "3") == -signal.SIGKILL
    assert launch(tmp_path, "none", "20", "12") == -signal.SIGKILL
    assert tensorboard_curves(tmp_path) == expected(range(13))
    assert launch(tmp_path, "10", "20") == 0
    assert tensorboard_curves(tmp_path) == expected(range(21))
    tables = tensorboard_tables(tmp_path)
    assert list(tables) == [0, 5, 10, 15, 20]
    assert all(f"|  | says {step} |  | 0.5 |" in table for step, table in tables.items())


def test_rewinds_within_one_process_show_every_step_once(tmp_path: Path) -> None:
    assert launch(tmp_path, "none", "20", "12:10", "11:10", "14:0", "15:15") == 0
    assert tensorboard_curves(tmp_path) == expected(range(21))
    assert launch(tmp_path, "20", "30", "27:22", "25") == -signal.SIGKILL
    assert launch(tmp_path, "22", "30") == 0
    assert tensorboard_curves(tmp_path) == expected(range(31))


def in_process(run_dir: Path, resume_step: int | None, last: int) -> list[Record]:
    trainer = TrainerConfig(logger=["tensorboard", "console", "jsonl"])
    tracker = Tracker(trainer, TrackingConfig(), {}, run_dir, "run")
    tracker.start(resume_step)
    for step in range(0 if resume_step is None else resume_step + 1, last + 1):
        tracker.log(step, metrics(step))
    tracker.finish()
    return list(tracker.history.records())


def test_a_clock_that_was_set_back_hides_no_step(tmp_path: Path) -> None:
    for resume_step, last in ((None, 5), (3, 8), (6, 10)):
        in_process(tmp_path, resume_step, last)
        assert tensorboard_curves(tmp_path) == expected(range(last + 1))
        newest = max((tmp_path / "tensorboard").glob("events*"))
        newest.rename(newest.with_name("events.out.tfevents.9999999999.host.1.0"))


def test_a_lost_tail_is_filled_from_the_history(tmp_path: Path) -> None:
    in_process(tmp_path, None, 8)
    (events,) = (tmp_path / "tensorboard").iterdir()
    events.write_bytes(events.read_bytes()[:-400])  # a power cut: metrics.jsonl was fsynced, the event file was not
    assert len(tensorboard_curves(tmp_path)["reward/mean"]) < 8
    in_process(tmp_path, 8, 10)
    assert tensorboard_curves(tmp_path) == expected(range(11))


def test_a_tracker_that_is_turned_on_later_shows_the_whole_run(tmp_path: Path) -> None:
    history = History(tmp_path / "metrics.jsonl")
    for step in range(6):
        history.append({"step": step, **metrics(step)})
    in_process(tmp_path, 5, 7)
    assert tensorboard_curves(tmp_path) == expected(range(8))
