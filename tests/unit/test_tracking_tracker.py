import importlib
import logging
import os
import sys
from pathlib import Path

import pytest

from rlhf.config import TrackingConfig, TrainerConfig, WandbConfig
from rlhf.errors import UserError
from rlhf.tracking import Tracker, check_trackers


def tracker_of(run_dir: Path, *names: str) -> Tracker:
    return Tracker(TrainerConfig(logger=list(names)), TrackingConfig(), {}, run_dir, "run")


def test_start_empties_a_fresh_run_and_truncates_a_resumed_one(tmp_path: Path) -> None:
    def run(resume_step: int | None, last: int) -> list[int]:
        tracker = tracker_of(tmp_path, "console", "jsonl")
        tracker.start(resume_step)
        for step in range(0 if resume_step is None else resume_step + 1, last + 1):
            tracker.log(step, {"x": 1.0})
        tracker.finish()
        return [record["step"] for record in tracker.history.records()]

    assert run(None, 7) == list(range(8))
    assert run(4, 6) == list(range(7))
    assert run(None, 3) == list(range(4))


def test_a_step_is_logged_once(tmp_path: Path) -> None:
    tracker = tracker_of(tmp_path)
    tracker.start(None)
    tracker.log(1, {"x": 1.0})
    with pytest.raises(ValueError, match="step 1"):
        tracker.log(1, {"x": 2.0})
    assert list(tracker.history.records()) == [{"step": 1, "x": 1.0}]


def test_history_errors_propagate(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(IsADirectoryError):
        tracker_of(tmp_path).start(None)


def test_samples_that_cannot_be_written_are_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "samples").write_text("a file where the folder should be")
    tracker = tracker_of(tmp_path)
    tracker.start(None)
    for step in range(3):
        tracker.log(step, {"x": 1.0}, [{"split": "rollout", "response": "r", "score": 1.0}])
    assert len(list(tracker.history.records())) == 3
    assert len(caplog.records) == 1
    assert "samples" in caplog.text


@pytest.mark.parametrize(("keep", "says"), [([1, 2, 4, 5], "lacks 1 "), ([1, 2], "lacks 3 "), ([], "lacks all ")])
def test_a_gap_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture, keep: list[int], says: str) -> None:
    tracker = tracker_of(tmp_path)
    for step in keep:
        tracker.history.append({"step": step})
    tracker.start(5)
    assert says in caplog.text
    assert [record["step"] for record in tracker.history.records()] == keep


def test_no_gap_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for first in (0, 1):
        tracker = tracker_of(tmp_path)
        tracker.start(None)
        for step in range(first, 6):
            tracker.log(step, {})
        tracker.start(3)
    assert caplog.text == ""


def test_a_tracker_that_cannot_start_is_off_after_one_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "tensorboard").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        tracker = tracker_of(tmp_path, "tensorboard")
        tracker.start(None)
        for step in range(3):
            tracker.log(step, {"x": 1.0})
        tracker.finish()
    assert len(caplog.records) == 1
    assert "tensorboard failed to start" in caplog.text
    assert len(list(tracker.history.records())) == 3


def test_a_tracker_that_fails_later_is_off_after_one_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("tensorboard")
    with caplog.at_level(logging.WARNING):
        tracker = tracker_of(tmp_path, "tensorboard")
        tracker.start(None)
        tracker.log(1, {"x": 1.0})
        tracker.log(2, {"x": "no number"})  # type: ignore[dict-item]
        tracker.log(3, {"x": "no number"})  # type: ignore[dict-item]
        tracker.finish()
    assert len(caplog.records) == 1
    assert "tensorboard failed to log" in caplog.text
    assert [record["step"] for record in tracker.history.records()] == [1, 2, 3]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    check_trackers(["console", "jsonl"], TrackingConfig())
    with pytest.raises(UserError, match=r"trainer.logger=.*wandb is not installed.*pip install 'rlhf\[wandb\]'"):
        check_trackers(["wandb"], TrackingConfig())


def test_a_folder_named_wandb_is_no_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    importlib.invalidate_caches()
    with pytest.raises(UserError, match="wandb is not installed"):
        check_trackers(["wandb"], TrackingConfig())


def test_installed_packages_pass_without_an_import(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    for name in ("tensorboard", "wandb"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    check_trackers(["tensorboard"], TrackingConfig())
    assert "tensorboard" not in sys.modules


@pytest.mark.parametrize(
    ("variables", "files", "known"),
    [
        ({}, {}, False),
        ({"WANDB_API_KEY": "a" * 40}, {}, True),
        ({"WANDB_MODE": "offline"}, {}, True),
        ({"WANDB_MODE": "online"}, {}, False),
        ({}, {".netrc": "machine api.wandb.ai login user password abc"}, True),
        ({}, {".netrc": "machine github.com login user password abc"}, False),
        ({"WANDB_BASE_URL": "https://own.org"}, {".netrc": "machine api.wandb.ai login user password abc"}, False),
        ({}, {".config/wandb/settings": "[default]\napi_key = abc"}, True),
    ],
)
def test_wandb_without_a_login_is_refused_at_the_start(variables, files, known, monkeypatch, tmp_path) -> None:
    pytest.importorskip("wandb")
    for name in [name for name in os.environ if name.startswith("WANDB_")] + ["NETRC"]:
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"HOME": str(tmp_path)} | variables).items():
        monkeypatch.setenv(name, value)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    check_trackers(["wandb"], TrackingConfig(wandb=WandbConfig(mode="offline")))
    if known:
        check_trackers(["wandb"], TrackingConfig())
        return
    with pytest.raises(UserError, match=r"nobody is logged in to wandb\. Run `wandb login`, or set WANDB_API_KEY, or"):
        check_trackers(["wandb"], TrackingConfig())


@pytest.mark.parametrize(("mode", "near"), [("offine", " Did you mean offline?"), ("disabled", "")])
def test_an_invalid_wandb_mode_is_rejected(monkeypatch, mode, near) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("WANDB_MODE", mode)
    with pytest.raises(UserError) as raised:
        check_trackers(["wandb"], TrackingConfig())
    assert str(raised.value).startswith(f"WANDB_MODE={mode}: must be online or offline.{near} For a run without wandb")


def saved_after(run_dir: Path, last: int) -> dict:
    """Return the tracker's state in a checkpoint of the step `last`, after which three more steps are logged."""
    tracker = tracker_of(run_dir)
    tracker.start(None)
    for step in range(1, last + 1):
        tracker.log(step, {"x": step / 3})
    saved = tracker.state_dict()
    for step in range(last + 1, last + 4):
        tracker.log(step, {"x": step / 3})
    return saved


def test_a_resume_cuts_the_history_at_the_checkpoints_mark(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved = saved_after(tmp_path, 300)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-3])  # torn
    # A resume reads nothing before the position that the checkpoint stores, so only later readers find damage there.
    path.write_bytes(path.read_bytes().replace(b'"step": 2,', b'"stop": 2,'))
    tracker = tracker_of(tmp_path)
    tracker.start(300, saved)
    assert path.read_bytes().count(b"\n") == 300
    assert caplog.text == ""


def test_an_imported_checkpoint_gives_no_history_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracker_of(tmp_path).start(300, {})
    assert caplog.text == ""


def test_a_history_that_was_deleted_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved = saved_after(tmp_path, 5)
    (tmp_path / "metrics.jsonl").unlink()
    tracker = tracker_of(tmp_path)
    tracker.start(5, saved)
    assert "lacks all of the records up to step 5" in caplog.text
    tracker.log(6, {"x": 2.0})
    caplog.clear()
    tracker_of(tmp_path).start(6, tracker.state_dict())
    assert caplog.text == "", "the checkpoint of step 6 has seen no more"


def test_a_fork_begins_without_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "source").mkdir()
    saved = saved_after(tmp_path / "source", 5)
    fork = Tracker(TrainerConfig(), TrackingConfig(), {}, tmp_path / "fork", "fork")
    fork.start(5, saved)
    fork.log(6, {"x": 1.0})
    fork.start(5, saved)
    assert list(fork.history.steps()) == []
    assert caplog.text == ""
