import logging
from pathlib import Path

import pytest

from rlhf.checkpoint.save.writer import SaveResult
from rlhf.config import TrackingConfig, TrainerConfig
from rlhf.tracking import Progress, Tracker
from rlhf.tracking.run_log import RunLog


def run_log(run_dir: Path) -> tuple[RunLog, Tracker]:
    tracker = Tracker(TrainerConfig(), TrackingConfig(), {}, run_dir, "run")
    return RunLog(tracker, Progress("plain", 10)), tracker


def test_a_rewound_log_is_that_of_a_resumed_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rewound, tracker = run_log(tmp_path / "rewound")
    rewound.start(0, resumed=False)
    for step in range(8):
        rewound.step(step, {"x": step / 3})
    rewound.note(SaveResult(tmp_path / "global_step_7", 2**20, 0.5))
    with caplog.at_level(logging.INFO):
        rewound.rewind(4)
        rewound.step(5, {"x": -5.0})
        rewound.step(6, {"x": -6.0})
    # As at a start, the first step shows at once; the save of a step that is undone is in no record.
    assert [record.message[:10] for record in caplog.records] == ["step  5/10"]

    resumed, other = run_log(tmp_path / "resumed")
    resumed.start(0, resumed=False)
    for step in range(5):
        resumed.step(step, {"x": step / 3})
    resumed, other = run_log(tmp_path / "resumed")
    resumed.start(4, resumed=True)
    resumed.step(5, {"x": -5.0})
    resumed.step(6, {"x": -6.0})
    assert tracker.history.path.read_bytes() == other.history.path.read_bytes()


def test_a_log_goes_back_to_its_very_start(tmp_path: Path) -> None:
    log, tracker = run_log(tmp_path)
    log.start(0, resumed=False)
    log.step(0, {"val/accuracy": 0.5})
    log.step(1, {"x": 1.0})
    log.rewind(0)
    log.step(1, {"x": 2.0})
    assert list(tracker.history.records()) == [{"step": 0, "val/accuracy": 0.5}, {"step": 1, "x": 2.0}]


def test_a_rank_without_a_tracker_goes_back_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    silent = RunLog(None, Progress.silent())
    with caplog.at_level(logging.INFO):
        silent.start(0, resumed=False)
        silent.step(1, {"x": 1.0})
        silent.rewind(0)
        silent.step(1, {"x": 1.0})
        silent.close()
    assert not caplog.records
