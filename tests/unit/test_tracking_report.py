import json
import math
import tracemalloc
from pathlib import Path

import pytest

from rlhf.config import Config
from rlhf.config.resolved import to_yaml
from rlhf.experience.validation_metrics import AnsweredPrompt, validation_metrics
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.gloo import GlooTransport
from rlhf.reward import RewardResult
from rlhf.tracking import History, write_report
from rlhf.tracking.report import summarize
from rlhf.tracking.source_results import source_results


@pytest.fixture(autouse=True)
def configured(tmp_path: Path) -> None:
    (tmp_path / "resolved.yaml").write_text(to_yaml(Config()))


def report(run_dir: Path) -> dict:
    assert sorted(path.name for path in (run_dir / "report").iterdir()) == ["report.html", "report.json"]
    return json.loads((run_dir / "report" / "report.json").read_text())


@pytest.mark.parametrize(("step", "words"), [(0, ["before"]), (2, ["after", "best"])])
def test_one_evaluation_is_before_or_after_the_training(tmp_path: Path, step: int, words: list[str]) -> None:
    history = History(tmp_path / "metrics.jsonl")
    for each in range(3):
        history.append({"step": each, "reward/mean": 0.5} | ({"val/accuracy": 0.25} if each == step else {}))
    text = write_report(tmp_path)
    assert [word for word in ("before", "after", "best") if f"25.0% {word}" in text] == words


def test_the_report_of_a_complete_run(tmp_path: Path) -> None:
    history = History(tmp_path / "metrics.jsonl")
    history.append({"step": 0, "val/accuracy": 0.4})
    for step in range(1, 5):
        accuracy = {"val/accuracy": {2: 0.95, 4: 0.9}[step]} if step % 2 == 0 else {}
        perf = {"timing_s/step": 2.5, "perf/tokens_per_second": float(step)}
        history.append({"step": step, "reward/mean": step / 4, **perf, **accuracy})
    for name in ("global_step_2", "global_step_4", "global_step_10", "global_step_x", "global_step_12.corrupt"):
        (tmp_path / name).mkdir()
    for name in ("global_step_2", "global_step_4", "global_step_x", "global_step_12.corrupt"):
        (tmp_path / name / "manifest.json").write_text("{}")
    text = write_report(tmp_path)
    assert report(tmp_path) == {
        "steps": 4,
        "first_step": 1,
        "headline": "val/accuracy",
        "accuracy_before": 0.4,
        "accuracy_after": 0.9,
        "best": 0.95,
        "reward": [[1, 0.25], [2, 0.5], [3, 0.75], [4, 1.0]],
        "evaluations": [[0, 0.4], [2, 0.95], [4, 0.9]],
        "sources": {"steps": [0, 4], "results": []},
        "findings": [],
        "tokens_per_second": 2.5,
        "skips": 0,
        "rollbacks": 0,
        "training_seconds": 10.0,
        "checkpoint": str(tmp_path / "global_step_4"),
    }
    assert "40.0% before, 90.0% after, 95.0% best" in text
    assert str(tmp_path / "global_step_4") in text
    assert "4 in 10 s" in text
    assert "guards" not in text


def test_the_reward_is_the_headline_where_scores_are_no_accuracy(tmp_path: Path) -> None:
    history = History(tmp_path / "metrics.jsonl")
    # By chance every score of the first evaluation is 0.
    history.append({"step": 0, "val/accuracy": 0.0, "val/reward": 0.0, "val-core/essays/acc/mean@1": 0.0})
    history.append({"step": 1, "val/accuracy": 0.5, "val/reward": -1.25, "val-core/essays/reward/mean@1": -1.25})
    text = write_report(tmp_path)
    summary = report(tmp_path)
    assert (summary["headline"], summary["val_reward_before"], summary["val_reward_after"]) == (
        "val/reward",
        0.0,
        -1.25,
    )
    assert (summary["best"], summary["evaluations"]) == (0.0, [[0, 0.0], [1, -1.25]])
    assert "held-out reward    0.000 before, -1.250 after, 0.000 best" in text
    assert "accuracy" not in text


def test_each_source_has_its_results_before_and_after(tmp_path: Path) -> None:
    """If a source's scores are all 0 or 1 in only one of two evaluations, both rows show its reward."""
    history = History(tmp_path / "metrics.jsonl")
    core, aux = "val-core/sums/acc", "val-aux/sums/acc"
    for step, value in ((0, 0.25), (2, 0.5), (4, 0.75)):
        history.append(
            {
                "step": step,
                "val/accuracy": value,
                f"{core}/mean@4": value,
                f"{aux}/pass@2": value / 2,
                f"{core}/pass@4": value,
                f"{core}/maj@4/mean": value,
                f"{core}/best@4/mean": 1.0,
                "val-core/essays/reward/mean@4": value - 1,
                **({"val-core/essays/acc/mean@4": 0.0} if step == 0 else {}),
            }
        )
    text = write_report(tmp_path)
    assert report(tmp_path)["sources"]["steps"] == [0, 4]
    rows = [line.split() for line in text.partition("data source")[2].splitlines()]
    assert rows == [
        ["metric", "step", "0", "step", "4"],
        ["essays", "mean@4", "-0.750", "-0.250"],
        ["sums", "mean@4", "0.250", "0.750"],
        ["sums", "pass@2", "0.125", "0.375"],
        ["sums", "pass@4", "0.250", "0.750"],
        ["sums", "maj@4", "0.250", "0.750"],
    ]


def test_a_reward_function_with_the_name_of_a_variable_is_no_source() -> None:
    results = [RewardResult(score=value, terms={"reward": value}) for value in (0.5, 1.5)]
    found = validation_metrics([AnsweredPrompt("org/sums", results, ["1", "2"])], 2, Coordinator(GlooTransport()))
    assert found["val-aux/org/sums/reward/reward/mean@2"] == 1.0
    assert list(source_results([found])[0]) == [("org/sums", "mean@2"), ("org/sums", "maj@2")]


def test_a_run_with_one_evaluation_has_one_column(tmp_path: Path) -> None:
    record = {"step": 3, "val/accuracy": 0.5, "val-core/sums/acc/mean@1": 0.5}
    History(tmp_path / "metrics.jsonl").append(record)
    assert write_report(tmp_path).splitlines()[-1].split() == ["sums", "mean@1", "0.500"]


NOTHING = {
    "reward/mean": 0.0,
    "reward/min": 0.0,
    "reward/max": 0.0,
    "reward/frac_zero_std": 1.0,
    "response_length/clip_ratio": 1.0,
    "actor/grad_norm": 0.0,
    "guards/refused": 0,
}
HIGHER = {"reward/mean": 1.0, "reward/min": 1.0, "reward/max": 1.0}
BETTER = {"reward/max": 1.0, "reward/frac_zero_std": 0.5, "response_length/clip_ratio": 0.9, "actor/grad_norm": 0.1}


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([{}, {}], ["reward never changed", "gradient was 0", "max_response_length"]),
        (
            [{}, {"reward/mean": 1.0, "reward/min": 1.0, "reward/max": 1.0}],
            ["equal rewards", "gradient", "max_response_length"],
        ),
        ([{}, BETTER], []),
        ([BETTER, BETTER | {"reward/timeouts": 3, "reward/failures": 1}], ["failed 1 times and timed out 3 times"]),
        ([BETTER | {"guards/refused": 1}] * 2, ["guards rejected"]),
        ([BETTER | {"guards/refused": 1}, BETTER], []),
    ],
)
def test_the_report_says_what_the_run_did_not_do(tmp_path: Path, steps: list[dict], expected: list[str]) -> None:
    """The record of the evaluation before the training lacks the metrics of the findings, which must not matter."""
    history = History(tmp_path / "metrics.jsonl")
    history.append({"step": 0, "val/accuracy": 0.0})
    for step, metrics in enumerate(steps, start=1):
        history.append({"step": step, **NOTHING, **metrics})
    text = " ".join(write_report(tmp_path).split())
    found = report(tmp_path)["findings"]
    assert len(found) == len(expected), found
    for finding, fact in zip(found, expected, strict=True):
        assert fact in finding
        assert finding in text.replace("warning ", "")
    assert [line for line in write_report(tmp_path).splitlines() if len(line) > 80 and str(tmp_path) not in line] == []


def test_the_report_counts_skips_and_rollbacks(tmp_path: Path) -> None:
    history = History(tmp_path / "metrics.jsonl")
    history.append({"step": 1, "guards/skips": 0, "guards/rollbacks": 0})
    history.append({"step": 2, "guards/skips": 0, "guards/rollbacks": 3})
    text = write_report(tmp_path)
    assert "batches skipped: 0, rollbacks: 3" in text
    assert (report(tmp_path)["skips"], report(tmp_path)["rollbacks"]) == (0, 3)


def test_writing_a_report_twice_gives_the_same_files(tmp_path: Path) -> None:
    History(tmp_path / "metrics.jsonl").append({"step": 1, "reward/mean": 0.5})
    first = write_report(tmp_path), (tmp_path / "report" / "report.html").read_bytes(), report(tmp_path)
    assert (write_report(tmp_path), (tmp_path / "report" / "report.html").read_bytes(), report(tmp_path)) == first


def test_no_evaluation_and_no_checkpoint(tmp_path: Path) -> None:
    History(tmp_path / "metrics.jsonl").append({"step": 1, "reward/mean": 0.5})
    text = write_report(tmp_path)
    assert report(tmp_path)["accuracy_before"] is None
    assert "held-out" not in text
    assert "none" in text


def test_no_records(tmp_path: Path) -> None:
    write_report(tmp_path)
    assert report(tmp_path)["steps"] == 0
    assert report(tmp_path)["checkpoint"] is None


def test_values_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    history = History(tmp_path / "metrics.jsonl")
    history.append({"step": 1, "reward/mean": math.nan, "perf/tokens_per_second": math.inf})
    history.append({"step": 2, "reward/mean": 0.5, "perf/tokens_per_second": 10.0})
    write_report(tmp_path)
    assert report(tmp_path)["reward"] == [[2, 0.5]]
    assert report(tmp_path)["tokens_per_second"] == 10.0


def test_a_history_that_starts_later_has_no_result_before_training(tmp_path: Path) -> None:
    """In a fork's history, or after the history was deleted, no record is from before the training."""
    history = History(tmp_path / "metrics.jsonl")
    for step in range(21, 29):
        history.append({"step": step, "val/accuracy": 0.5 + step / 100, "timing_s/step": 1.0})
    text = write_report(tmp_path)
    assert "21 to 28 in 8 s" in text
    assert "78.0% after, 78.0% best" in text
    assert "before" not in text


def test_the_report_of_a_long_run_is_no_longer(tmp_path: Path) -> None:
    others = {f"metric_{number}": number / 7 for number in range(4)}
    lines = (json.dumps({"step": step, "reward/mean": step / 2} | others) + "\n" for step in range(1, 50_001))
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    tracemalloc.start()
    summarize(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    write_report(tmp_path)
    reward = report(tmp_path)["reward"]
    assert len(reward) == 10_000
    assert (reward[0], reward[-1]) == ([1, 0.5], [50_000, 25_000.0])
    assert peak < 12 << 20, "the records alone take more than 30 MB"
