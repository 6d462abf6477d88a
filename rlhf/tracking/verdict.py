"""Judges in one line whether a run learned, is stuck or is unstable, and names the figures."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rlhf.tracking.headline import ACCURACY, headline_of

FEWEST_STEPS = 10
CLEAR = 2.5
"""A change of the mean reward counts if it exceeds this many standard errors of the difference of the means."""
CLEAR_GAIN = {"accuracy": 0.02, "val_reward": 0.0}
"""Smallest change of a held-out result that counts."""
REJECTED_SHARE = 0.05
"""A run is unstable if the guards rejected at least this share of its batches."""


@dataclass(frozen=True)
class RunVerdict:
    """A judgement with its figures in words."""

    kind: Literal["learned", "learned nothing", "stuck", "unstable", "unclear", "too short", "empty"]
    text: str


@dataclass(frozen=True)
class Window:
    """Mean of a metric over some steps, and the standard error of the mean."""

    mean: float
    error: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Window":
        """Summarize the values of consecutive steps."""
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        return cls(statistics.fmean(values), spread / math.sqrt(len(values)))


def verdict(
    report: Mapping[str, Any], rewards: Sequence[float], *, nothing_learned: bool, broken_steps: int
) -> RunVerdict:
    """Judge a run.

    Args:
        report: the content of report.json (`tracking.report`).
        rewards: the mean reward of each step.
        nothing_learned: from `Findings`.
        broken_steps: steps whose loss or gradient norm is not finite.
    """
    if not rewards:
        return RunVerdict("empty", "No step is recorded yet.")
    if nothing_learned:
        return RunVerdict("learned nothing", report["findings"][0].partition(";")[0] + ".")
    if broken_steps:
        return RunVerdict("unstable", f"The loss or the gradient was not a finite number in {_steps(broken_steps)}.")
    if (skips := report["skips"] + report["rollbacks"]) > REJECTED_SHARE * len(rewards):
        return RunVerdict("unstable", f"The guards rejected {skips:,} batches in {_steps(len(rewards))}.")
    if len(rewards) < FEWEST_STEPS:
        return RunVerdict("too short", f"{_steps(len(rewards))}: too few to judge. {_evaluated(report)[0]}".strip())
    return _judge(report, rewards)


def _judge(report: Mapping[str, Any], rewards: Sequence[float]) -> RunVerdict:
    size = max(5, len(rewards) // 10)
    first, last = Window.of(rewards[:size]), Window.of(rewards[-size:])
    starts = range(0, len(rewards) - size + 1, max(1, size // 2))
    best = max((Window.of(rewards[start : start + size]) for start in starts), key=lambda window: window.mean)
    text = f"Mean reward {first.mean:.3f} in the first {size} steps, {last.mean:.3f} in the last {size}."
    evaluated, gain = _evaluated(report)
    figures = f"{text} {evaluated}".strip()
    if _exceeds(best, last) and best.mean - last.mean > 0.5 * max(best.mean - first.mean, 0.0):
        return RunVerdict("unstable", f"The reward fell from its best mean of {best.mean:.3f}. {figures}")
    rose = _exceeds(last, first)
    clear = gain is None or abs(gain) > CLEAR_GAIN[headline_of(report).key]
    if gain is not None and clear and gain < 0:
        return RunVerdict("unstable", f"The held-out result fell. {figures}")
    if rose and not clear:
        return RunVerdict("unclear", f"The training reward rose, the held-out result did not. {figures}")
    if rose or (gain is not None and clear):
        return RunVerdict("learned", figures)
    return RunVerdict("stuck", f"The reward did not rise beyond its noise. {figures}")


def _exceeds(higher: Window, lower: Window) -> bool:
    return higher.mean - lower.mean > CLEAR * math.hypot(higher.error, lower.error) + 1e-12


def _evaluated(report: Mapping[str, Any]) -> tuple[str, float | None]:
    """Return the held-out results in words, and their change; None without two results."""
    shown = headline_of(report)
    before, after = report[f"{shown.key}_before"], report[f"{shown.key}_after"]
    if before is None or after is None or len(report["evaluations"]) < 2:
        return "", None
    label = "Held-out accuracy" if shown == ACCURACY else "Held-out reward"
    return f"{label} {format(before, shown.format)} before, {format(after, shown.format)} after.", after - before


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count:,} steps"
