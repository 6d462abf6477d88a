"""Progress of a run: few lines, and a bar that keeps its most important parts at every width."""

import io

import pytest
from rich.console import Console

from rlhf.tracking import progress
from rlhf.tracking.progress import Progress, duration

FIGURES = {"reward/mean": 0.25, "val/accuracy": 0.375, "perf/tokens_per_second": 1234.5}


def steps(lines: list[str]) -> list[int]:
    return [int(line.split()[1].split("/")[0]) for line in lines]


def run(first: int, last: int, evaluate_every: int = 1000) -> list[str]:
    lines: list[str] = []
    shown = Progress(lines.append)
    shown.start(first, last)
    for step in range(first + 1, last + 1):
        accuracy = {"val/accuracy": 0.5} if step % evaluate_every == 0 else {}
        shown.update(step, {"reward/mean": 0.25, "perf/tokens_per_second": 1234.5} | accuracy)
    return lines


def drawn(shown: Progress, width: int) -> list[str]:
    """Return the lines of the bar on a terminal of `width` columns."""
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system="standard")
    return ["".join(segment.text for segment in line).rstrip() for line in console.render_lines(shown, pad=False)]


def test_lines_are_few_but_first_last_and_evaluations_show():
    lines = run(40, 200, evaluate_every=50)
    assert steps(lines) == [41, 50, 100, 150, 200]
    assert lines[0].startswith("step  41/200  reward 0.250  tokens/s 1,234  ETA ")
    assert "held-out accuracy 50.0%" in lines[-1]


def test_the_first_step_shows_after_the_evaluation_before_training():
    lines: list[str] = []
    shown = Progress(lines.append)
    shown.start(0, 9)
    shown.update(0, {"val/accuracy": 0.5})
    shown.update(1, {})
    shown.update(2, {})
    assert steps(lines) == [0, 1]


def test_lines_come_at_intervals(monkeypatch):
    monkeypatch.setattr(progress, "LINE_INTERVAL_S", 0.0)
    assert steps(run(0, 5)) == [1, 2, 3, 4, 5]


def test_phases_are_named_once_at_the_start_and_then_only_when_they_last(monkeypatch):
    lines: list[str] = []
    shown = Progress(lines.append)
    for name in ("starting", "loading", "first evaluation", "first evaluation: generating"):
        shown.phase(0, 0, name)
    shown.start(0, 9)
    for done in range(100):
        shown.phase(0, 1, "generating", done, 100)
    shown.phase(0, 1, "update")
    assert lines == ["starting", "loading", "first evaluation", "step 1/9  generating 0/100", "step 1/9  update"]

    shown.update(1, {})
    lines.clear()
    shown.phase(0, 2, "generating", 0, 100)
    assert lines == []
    monkeypatch.setattr(progress, "PHASE_INTERVAL_S", 0.0)
    shown.phase(0, 2, "generating", 37, 100)
    assert lines == ["step 2/9  generating 37/100"]


def test_counts_are_those_of_all_ranks_at_the_same_step():
    shown = Progress(lambda _: None)
    shown.start(0, 9)
    shown.phase(1, 1, "generating", 256, 256)  # the last report of rank 1 in this phase; rank 1 is ahead of rank 0
    shown.phase(1, 1, "reward", 0, 256)
    shown.phase(0, 1, "generating", 44, 256)
    assert shown.phase_text == "generating 300/512"
    shown.phase(2, 1, "generating", 5, 256)
    assert shown.phase_text == "generating 305/768"
    shown.phase(0, 2, "generating", 1, 256)
    assert shown.phase_text == "generating 1/256"


@pytest.mark.parametrize(
    ("width", "kept"),
    [
        (200, ["generating 37/512", "reward 0.250", "held-out accuracy 37.5%", "tokens/s 1,234", "ETA"]),
        (80, ["generating 37/512", "reward 0.250", "ETA"]),
        (60, ["generating 37/512", "reward 0.250"]),
        (40, ["reward 0.250"]),
        (30, []),
        (16, []),
    ],
)
def test_the_bar_keeps_what_matters_at_every_width(width, kept):
    shown = Progress(lambda _: None)
    shown.start(0, 1200)
    shown.update(37, FIGURES)
    shown.phase(0, 38, "generating", 37, 512)
    line, below = drawn(shown, width)
    assert below == ""
    assert len(line) < width
    assert line.startswith("step   37/1200"[: width - 1])
    assert [text for text in ("generating", "reward", "held-out", "tokens/s", "ETA") if text in line] == [
        text.split()[0] for text in kept
    ]
    assert all(text in line for text in kept)
    assert ("━" in line) == (width >= 30)


def test_before_the_first_step_the_bar_is_the_phase_and_its_seconds(monkeypatch):
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    shown = Progress(lambda _: None)
    shown.phase(0, 0, "loading the weights")
    assert drawn(shown, 60) == ["loading the weights", ""]
    now = 75.0
    assert drawn(shown, 60) == ["loading the weights 1m15s", ""]
    shown.note("model.safetensors: 45%")
    assert drawn(shown, 60) == ["loading the weights 1m15s model.safetensors: 45%", ""]
    shown.ended = True
    assert drawn(shown, 60) == ["loading the weights 1m15s model.safetensors: 45%"]


def test_the_bar_goes_back_in_place():
    shown = Progress(lambda _: None)
    shown.start(0, 9)
    shown.update(7, {"val/accuracy": 0.375})
    shown.start(4, 9)
    shown.update(5, {"reward/mean": 0.25})
    line = drawn(shown, 80)[0]
    assert "step 5/9" in line
    assert "reward 0.250" in line
    assert "held-out" not in line, "the evaluation was of a step that was rolled back"


@pytest.mark.parametrize(("seconds", "text"), [(5.4, "5s"), (100, "1m40s"), (3599.6, "1h00m"), (7325, "2h02m")])
def test_durations(seconds, text):
    assert duration(seconds) == text
