import logging

import pytest

from rlhf.tracking import Progress, progress


def shown_steps(caplog: pytest.LogCaptureFixture) -> list[int]:
    return [int(record.message.split()[1].split("/")[0]) for record in caplog.records]


def run(shown: Progress, first: int, last: int, evaluate_every: int = 1000) -> None:
    shown.start(first)
    for step in range(first + 1, last + 1):
        accuracy = {"val/accuracy": 0.5} if step % evaluate_every == 0 else {}
        shown.update(step, {"reward/mean": 0.25, "perf/tokens_per_second": 1234.5} | accuracy)
    shown.close()


def test_plain_lines_are_few_but_first_last_and_evaluations_show(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        run(Progress("plain", 200), 40, 200, evaluate_every=50)
    assert shown_steps(caplog) == [41, 50, 100, 150, 200]
    assert caplog.messages[0].startswith("step  41/200  reward 0.250  tokens/s 1,234  ETA ")
    assert "held-out accuracy 50.0%" in caplog.messages[-1]


def test_the_first_step_shows_after_the_evaluation_before_training(caplog: pytest.LogCaptureFixture) -> None:
    shown = Progress("plain", 9)
    with caplog.at_level(logging.INFO):
        shown.start(0)
        shown.update(0, {"val/accuracy": 0.5})
        shown.update(1, {})
        shown.update(2, {})
    assert shown_steps(caplog) == [0, 1]


def test_plain_lines_come_at_intervals(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PLAIN_INTERVAL_S", 0.0)
    with caplog.at_level(logging.INFO):
        run(Progress("auto", 5), 0, 5)  # the tests' stderr is no terminal
    assert shown_steps(caplog) == [1, 2, 3, 4, 5]


def test_the_live_bar_shows_numbers_and_keeps_log_lines_whole(capsys: pytest.CaptureFixture) -> None:
    import sys

    handler = logging.StreamHandler(sys.stderr)
    root = logging.getLogger()
    root.addHandler(handler)
    before = handler.stream
    try:
        shown = Progress("live", 7)
        shown.start(0)
        shown.update(0, {"val/accuracy": 0.375})
        logging.getLogger("rlhf").warning("a line in between")
        shown.update(7, {"reward/mean": 0.25})
        shown.close()
    finally:
        root.removeHandler(handler)
    assert handler.stream is before
    text = capsys.readouterr().err
    assert "7/7" in text
    assert "held-out accuracy 37.5%" in text
    assert "reward 0.250" in text
    assert "a line in between\n" in text


def test_the_live_bar_goes_back_in_place(capsys: pytest.CaptureFixture) -> None:
    import sys

    handler = logging.StreamHandler(sys.stderr)
    root = logging.getLogger()
    root.addHandler(handler)
    before, streams = handler.stream, (sys.stdout, sys.stderr)
    try:
        shown = Progress("live", 9)
        shown.start(0)
        shown.update(7, {"val/accuracy": 0.375})
        shown.start(4)
        during = handler.stream
        shown.update(5, {"reward/mean": 0.25})
        shown.close()
    finally:
        root.removeHandler(handler)
    assert during is not before
    assert handler.stream is before
    assert (sys.stdout, sys.stderr) == streams
    last_line = [line for line in capsys.readouterr().err.splitlines() if "step" in line][-1]
    assert "5/9" in last_line
    assert "reward 0.250" in last_line
    assert "held-out" not in last_line  # it was that of a step that is undone


def test_silent_shows_nothing(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        silent = Progress.silent()
        run(silent, 0, 5, evaluate_every=1)
        silent.message("nobody reads this")
    assert not caplog.records
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("seconds", "text"), [(5.4, "5s"), (100, "1m40s"), (3599.6, "1h00m"), (7325, "2h02m")])
def test_durations(seconds: float, text: str) -> None:
    assert progress._duration(seconds) == text
