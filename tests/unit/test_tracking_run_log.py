import logging
from pathlib import Path

import pytest

from rlhf.checkpoint.save.writer import SaveResult
from rlhf.config import TrackingConfig, TrainerConfig
from rlhf.ranks.progress_pipe import ProgressDisplay
from rlhf.tracking import Tracker
from rlhf.tracking.progress import Progress
from rlhf.tracking.run_log import RunLog


def run_log(run_dir: Path, lines: list[str] | None = None) -> tuple[RunLog, Tracker]:
    tracker = Tracker(TrainerConfig(), TrackingConfig(), {}, run_dir, "run")
    return RunLog(tracker, ProgressDisplay() if lines is None else Progress(lines.append), 10), tracker


def test_a_rewound_log_is_that_of_a_resumed_run(tmp_path: Path) -> None:
    lines: list[str] = []
    rewound, tracker = run_log(tmp_path / "rewound", lines)
    rewound.start(0, resumed=False)
    for step in range(8):
        rewound.step(step, {"x": step / 3})
    rewound.note(SaveResult(tmp_path / "global_step_7", 2**20, 0.5))
    lines.clear()
    rewound.rewind(4)
    rewound.step(5, {"x": -5.0})
    rewound.step(6, {"x": -6.0})
    # The first step after the rewind shows at once, as at a start. The save was of a step that was rolled back, so no
    # record has it.
    assert [line[:10] for line in lines] == ["step  5/10"]

    resumed, other = run_log(tmp_path / "resumed")
    resumed.start(0, resumed=False)
    for step in range(5):
        resumed.step(step, {"x": step / 3})
    resumed, other = run_log(tmp_path / "resumed")
    resumed.start(4, resumed=True)
    resumed.step(5, {"x": -5.0})
    resumed.step(6, {"x": -6.0})
    assert tracker.history.path.read_bytes() == other.history.path.read_bytes()


def test_a_log_rewinds_to_step_0(tmp_path: Path) -> None:
    log, tracker = run_log(tmp_path)
    log.start(0, resumed=False)
    log.step(0, {"val/accuracy": 0.5})
    log.step(1, {"x": 1.0})
    log.rewind(0)
    log.step(1, {"x": 2.0})
    assert list(tracker.history.records()) == [{"step": 0, "val/accuracy": 0.5}, {"step": 1, "x": 2.0}]


def test_a_rank_without_a_tracker_goes_back_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    lines: list[str] = []
    silent = RunLog(None, Progress(lines.append), 10, log_samples=True)
    with caplog.at_level(logging.INFO):
        silent.start(0, resumed=False)
        silent.step(1, {"x": 1.0})
        silent.rewind(0)
        silent.step(1, {"x": 1.0})
        silent.close()
    assert not caplog.records
    assert not lines


def test_the_headline_of_an_evaluation_is_shown_alone(tmp_path: Path) -> None:
    for figures, wanted in (
        ({"val/accuracy": 0.5, "val/reward": 0.25}, "held-out accuracy 50.0%"),
        ({"val/accuracy": 0.0, "val/reward": 0.25, "val-core/x/reward/mean@1": 0.25}, "held-out reward 0.250"),
    ):
        lines: list[str] = []
        log, _ = run_log(tmp_path / wanted, lines)
        log.start(0, resumed=False)
        log.step(0, figures)
        assert lines == [f"step  0/10  {wanted}"]
