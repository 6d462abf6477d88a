"""Writes the report of a run as numbers, a curve and a few lines of text."""

import io
import json
import math
import statistics
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rlhf.storage.files import make_dir_durably, replace_durably
from rlhf.storage.layout import HISTORY, MANIFEST, scan
from rlhf.tracking.headline import ACCURACY, REWARD, Headline, headline
from rlhf.tracking.history import History, Record

SMOOTHING_STEPS = 10
POINTS = 10_000
"""Largest number of points of a curve in report.json and reward.png."""


def write_report(run_dir: Path) -> str:
    """Write `report/report.json` and `report/reward.png`, and return the text to show.

    Reads metrics.jsonl and the newest checkpoint's name, at any time of a run, even without records. The same input
    gives the same files.
    """
    report = _summarize(History(run_dir / HISTORY).records(), _newest_checkpoint(run_dir))
    folder = run_dir / "report"
    make_dir_durably(folder)
    replace_durably(folder / "report.json", json.dumps(report, indent=1).encode() + b"\n")
    replace_durably(folder / "reward.png", _plot(report))
    return _text(report, folder)


def read_report(run_dir: Path) -> str:
    """Return the text of `write_report` without writing files."""
    records = History(run_dir / HISTORY).records()
    return _text(_summarize(records, _newest_checkpoint(run_dir)), run_dir / "report")


def _newest_checkpoint(run_dir: Path) -> Path | None:
    return next((path for path in scan(run_dir) if (path / MANIFEST).is_file()), None)


class _Curve:
    """Stores the finite values of one metric with their steps, 16 bytes per step."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.steps, self.values = array("q"), array("d")

    def add(self, record: Record) -> None:
        value = record.get(self._name, math.nan)
        if math.isfinite(value):
            self.steps.append(record["step"])
            self.values.append(value)

    def points(self) -> list[list[float]]:
        """Return up to POINTS evenly spaced [step, value] pairs, always with the first and the last."""
        count = len(self.steps)
        chosen = range(count) if count <= POINTS else [i * (count - 1) // (POINTS - 1) for i in range(POINTS)]
        return [[self.steps[i], self.values[i]] for i in chosen]


def _summarize(records: Iterable[Record], checkpoint: Path | None) -> dict[str, Any]:
    names = (ACCURACY.metric, REWARD.metric, "reward/mean", "perf/tokens_per_second", "timing_s/step")
    curves = accuracy, held_out, reward, speed, seconds = tuple(map(_Curve, names))
    shown = ACCURACY
    first: int | None = None
    last: Record = {"step": 0}
    for last in records:
        first = last["step"] if first is None else first
        shown = REWARD if headline(last) == REWARD else shown
        for curve in curves:
            curve.add(last)
    evaluated = held_out if shown == REWARD else accuracy
    return {
        "steps": last["step"],
        "first_step": max(1, first or 1),  # a fork begins after the steps of its source
        "headline": shown.metric,
        f"{shown.key}_before": evaluated.values[0] if 0 in evaluated.steps[:1] else None,
        f"{shown.key}_after": evaluated.values[-1] if evaluated.values else None,
        "best": max(evaluated.values, default=None),
        "reward": reward.points(),
        "evaluations": evaluated.points(),
        "tokens_per_second": statistics.median(speed.values) if speed.values else None,
        "skips": last.get("guards/skips", 0),
        "rollbacks": last.get("guards/rollbacks", 0),
        "training_seconds": math.fsum(seconds.values),
        "checkpoint": None if checkpoint is None else str(checkpoint),
    }


def _headline(report: dict[str, Any]) -> Headline:
    return REWARD if report["headline"] == REWARD.metric else ACCURACY


def _plot(report: dict[str, Any]) -> bytes:
    # Without pyplot, Figure draws with Agg, opens no window and leaves matplotlib's global state unchanged.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    if report["reward"]:
        steps, rewards = zip(*report["reward"], strict=True)
        smooth = [statistics.fmean(rewards[max(0, i + 1 - SMOOTHING_STEPS) : i + 1]) for i in range(len(rewards))]
        axes.plot(steps, rewards, color="tab:blue", alpha=0.35, linewidth=1, label="reward (mean of the batch)")
        axes.plot(
            steps, smooth, color="tab:blue", linewidth=2, label=f"reward (mean of the last {SMOOTHING_STEPS} steps)"
        )
    shown = _headline(report)
    if report["evaluations"]:
        steps, values = zip(*report["evaluations"], strict=True)
        axes.plot(steps, values, "o--", color="tab:orange", markersize=6, linewidth=1, label=shown.label)
        for index in {0, len(steps) - 1}:
            axes.annotate(
                format(values[index], shown.format),
                (steps[index], values[index]),
                (0, 9),
                textcoords="offset points",
                ha="center",
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
            )
    if axes.lines:
        axes.legend(loc="best")
    else:
        axes.text(0.5, 0.5, "no steps recorded", ha="center", va="center", transform=axes.transAxes)
    axes.set_xlabel("training step")
    axes.set_ylabel("reward and accuracy" if report["evaluations"] and shown == ACCURACY else "reward")
    axes.margins(y=0.12)
    axes.grid(alpha=0.3)
    png = io.BytesIO()
    figure.savefig(png, format="png")
    return png.getvalue()


def _text(report: dict[str, Any], folder: Path) -> str:
    steps = f"{report['first_step']} to {report['steps']}" if report["first_step"] > 1 else str(report["steps"])
    rows = [("steps", f"{steps} in {report['training_seconds']:.0f} s")]
    shown = _headline(report)
    values = {"before": report[f"{shown.key}_before"], "after": report[f"{shown.key}_after"], "best": report["best"]}
    if known := [f"{format(value, shown.format)} {name}" for name, value in values.items() if value is not None]:
        rows.append((shown.label, ", ".join(known)))
    if report["reward"]:
        rows.append(("reward", f"{report['reward'][0][1]:.3f} first step, {report['reward'][-1][1]:.3f} last step"))
    if report["tokens_per_second"] is not None:
        rows.append(("tokens per second", f"{report['tokens_per_second']:,.0f}"))
    if report["skips"] or report["rollbacks"]:
        rows.append(("guards", f"batches skipped: {report['skips']}, rollbacks: {report['rollbacks']}"))
    rows.append(("checkpoint", report["checkpoint"] or "none"))
    if (folder / "reward.png").exists():
        rows.append(("reward curve", f"{folder / 'reward.png'} (numbers: report.json)"))
    return "\n".join(f"{label:<18} {value}" for label, value in rows)
