"""The report of a run: what it reached, as numbers, as a curve and as a few lines of text."""

import io
import json
import math
import statistics
from pathlib import Path
from typing import Any

from rlhf.storage.files import make_dir, replace_durably
from rlhf.tracking.history import History, Record

SMOOTHING_STEPS = 10


def write_report(run_dir: Path) -> str:
    """Write `report/report.json` and `report/reward.png` from metrics.jsonl and the newest checkpoint's name.

    Works at any time of a run, with no evaluation and with no records; the same input gives the same files.

    Returns:
        The text to show.
    """
    records = History(run_dir / "metrics.jsonl").records()
    report = _summarize(records, _newest_checkpoint(run_dir))
    folder = run_dir / "report"
    make_dir(folder)
    replace_durably(folder / "report.json", json.dumps(report, indent=1).encode() + b"\n")
    replace_durably(folder / "reward.png", _plot(report))
    return _text(report, folder)


def read_report(run_dir: Path) -> str:
    """The same text, with nothing written."""
    records = History(run_dir / "metrics.jsonl").records()
    return _text(_summarize(records, _newest_checkpoint(run_dir)), run_dir / "report")


def _newest_checkpoint(run_dir: Path) -> Path | None:
    def step(path: Path) -> int:
        number = path.parent.name.removeprefix("global_step_")
        return int(number) if number.isdecimal() else -1

    newest = max(run_dir.glob("global_step_*/manifest.json"), key=step, default=None)
    return newest.parent if newest is not None and step(newest) >= 0 else None


def _curve(records: list[Record], name: str) -> list[list[float]]:
    return [[record["step"], record[name]] for record in records if math.isfinite(record.get(name, math.nan))]


def _summarize(records: list[Record], checkpoint: Path | None) -> dict[str, Any]:
    accuracy = _curve(records, "val/accuracy")
    speeds = [speed for _, speed in _curve(records, "perf/tokens_per_second")]
    return {
        "steps": records[-1]["step"] if records else 0,
        "accuracy_before": accuracy[0][1] if accuracy else None,
        "accuracy_after": accuracy[-1][1] if accuracy else None,
        "best": max(value for _, value in accuracy) if accuracy else None,
        "reward": _curve(records, "reward/mean"),
        "val_accuracy": accuracy,
        "tokens_per_second": statistics.median(speeds) if speeds else None,
        "skips": records[-1].get("guards/skips", 0) if records else 0,
        "rollbacks": records[-1].get("guards/rollbacks", 0) if records else 0,
        "training_seconds": math.fsum(seconds for _, seconds in _curve(records, "perf/step_seconds")),
        "checkpoint": None if checkpoint is None else str(checkpoint),
    }


def _plot(report: dict[str, Any]) -> bytes:
    # Figure without pyplot draws with Agg, opens no window and leaves matplotlib's global state alone.
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
    if report["val_accuracy"]:
        steps, accuracy = zip(*report["val_accuracy"], strict=True)
        axes.plot(steps, accuracy, "o--", color="tab:orange", markersize=6, linewidth=1, label="held-out accuracy")
        for index in {0, len(steps) - 1}:
            axes.annotate(
                f"{accuracy[index]:.1%}",
                (steps[index], accuracy[index]),
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
    axes.set_ylabel("reward and accuracy" if report["val_accuracy"] else "reward")
    axes.margins(y=0.12)
    axes.grid(alpha=0.3)
    png = io.BytesIO()
    figure.savefig(png, format="png")
    return png.getvalue()


def _text(report: dict[str, Any], folder: Path) -> str:
    rows = [("steps", f"{report['steps']} in {report['training_seconds']:.0f} s")]
    if report["accuracy_before"] is not None:
        before, after, best = report["accuracy_before"], report["accuracy_after"], report["best"]
        rows.append(("held-out accuracy", f"{before:.1%} before, {after:.1%} after, {best:.1%} best"))
    if report["reward"]:
        rows.append(("reward", f"{report['reward'][0][1]:.3f} first step, {report['reward'][-1][1]:.3f} last step"))
    if report["tokens_per_second"] is not None:
        rows.append(("tokens per second", f"{report['tokens_per_second']:,.0f}"))
    if report["skips"] or report["rollbacks"]:
        rows.append(("guards", f"batches skipped: {report['skips']}, roll-backs: {report['rollbacks']}"))
    rows.append(("checkpoint", report["checkpoint"] or "none"))
    if (folder / "reward.png").exists():
        rows.append(("reward curve", f"{folder / 'reward.png'} (numbers: report.json)"))
    return "\n".join(f"{label:<18} {value}" for label, value in rows)
