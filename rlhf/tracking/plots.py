"""Draws the curves of reports as PNG files."""

import io
import statistics
from collections.abc import Sequence
from typing import Any

from rlhf.printable import wrapped
from rlhf.tracking.headline import ACCURACY, headline_of

SMOOTHING_STEPS = 10
LONGEST_LABEL = 60
COLOURS = 10
"""Colours of matplotlib's default cycle."""


def plot_report(report: dict[str, Any]) -> bytes:
    """Return the reward and the evaluations of one run."""
    figure, axes = _figure()
    if report["reward"]:
        steps, rewards = zip(*report["reward"], strict=True)
        axes.plot(steps, rewards, color="tab:blue", alpha=0.35, linewidth=1, label="reward (mean of the batch)")
        label = f"reward (mean of the last {SMOOTHING_STEPS} steps)"
        axes.plot(steps, _smooth(rewards), color="tab:blue", linewidth=2, label=label)
    shown = headline_of(report)
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
    return _png(figure, axes, accuracy=bool(report["evaluations"]) and shown == ACCURACY)


def plot_runs(runs: Sequence[tuple[str, dict[str, Any]]]) -> bytes:
    """Return the smoothed rewards (lines) and the evaluations (points) of several runs, each a name and a report."""
    figure, axes = _figure()
    accuracy = False
    for number, (name, report) in enumerate(runs):
        colour, style = f"C{number % COLOURS}", ("-", "--", ":", "-.")[number // COLOURS % 4]
        if report["reward"]:
            steps, rewards = zip(*report["reward"], strict=True)
            label = "\n".join(wrapped(name, LONGEST_LABEL))
            axes.plot(steps, _smooth(rewards), style, color=colour, linewidth=2, label=label)
        if report["evaluations"]:
            axes.plot(*zip(*report["evaluations"], strict=True), "o", color=colour, markersize=5)
            accuracy = accuracy or headline_of(report) == ACCURACY
    axes.set_title(f"reward (mean of the last {SMOOTHING_STEPS} steps); points: held-out prompts", fontsize="medium")
    return _png(figure, axes, accuracy=accuracy)


def _smooth(values: Sequence[float]) -> list[float]:
    return [statistics.fmean(values[max(0, i + 1 - SMOOTHING_STEPS) : i + 1]) for i in range(len(values))]


def _figure() -> tuple[Any, Any]:
    # Without pyplot, Figure draws with Agg, opens no window and leaves matplotlib's global state unchanged.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    return figure, figure.subplots()


def _png(figure: Any, axes: Any, *, accuracy: bool) -> bytes:
    if axes.lines:
        axes.legend(loc="best", fontsize="small")
    else:
        axes.text(0.5, 0.5, "no steps recorded", ha="center", va="center", transform=axes.transAxes)
    axes.set_xlabel("training step")
    axes.set_ylabel("reward and accuracy" if accuracy else "reward")
    axes.margins(y=0.12)
    axes.grid(alpha=0.3)
    png = io.BytesIO()
    figure.savefig(png, format="png")
    return png.getvalue()
