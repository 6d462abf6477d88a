"""Judges in one line whether a run learned, is stuck or is unstable, and names the figures."""

import itertools
import math
import statistics
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlhf.storage.layout import HISTORY
from rlhf.tracking.findings import Findings
from rlhf.tracking.headline import ACCURACY, headline_of
from rlhf.tracking.history import History, Record
from rlhf.tracking.report import summarize

FEWEST_STEPS = 10
CLEAR = 2.5
"""A change of the mean reward counts if it exceeds this many standard errors of the difference of the means."""
CLEAR_GAIN = {"accuracy": 0.02, "val_reward": 0.0}
"""Name of a held-out result in report.json -> size that its change must exceed to count."""
REJECTED_SHARE = 0.05
"""A run is unstable if the guards rejected more batches than this share of its steps."""
NOT_FINITE = "not a finite number"
"""Cause of a verdict that alerts send even before step `tracking.alerts.first_step`."""


@dataclass(frozen=True)
class RunVerdict:
    """A judgement with its figures in words."""

    kind: Literal["learned", "learned nothing", "stuck", "unstable", "unclear", "too short", "empty"]
    text: str
    cause: str = ""
    """Why a run learned nothing, is stuck or unstable. Has no figures, so the text stays the same during the run."""


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


def is_broken(record: Record) -> bool:
    """Return whether the loss or the gradient norm of a step is not finite."""
    return any(not math.isfinite(record.get(name, 0.0)) for name in ("actor/loss", "actor/grad_norm"))


class Judge:
    """Collects what a verdict needs besides the report, record by record."""

    def __init__(self) -> None:
        self._findings, self._broken_steps = Findings(), 0
        self._rewards = array("d")

    def add(self, record: Record) -> None:
        """Add a record. Records come in the order of steps."""
        self._findings.add(record)
        self._broken_steps += is_broken(record)
        if math.isfinite(reward := record.get("reward/mean", math.nan)):
            self._rewards.append(reward)

    def verdict(self, report: Mapping[str, Any]) -> RunVerdict:
        """Judge the run whose report.json has the content `report`."""
        nothing_learned = self._findings.nothing_learned
        return verdict(report, self._rewards, nothing_learned=nothing_learned, broken_steps=self._broken_steps)


def judge_run(run_dir: Path) -> RunVerdict:
    """Judge the run so far, as its report does.

    Raises:
        UserError: the history is damaged.
    """
    judge = Judge()
    for record in History(run_dir / HISTORY).records():
        judge.add(record)
    return judge.verdict(summarize(run_dir))


def verdict(
    report: Mapping[str, Any], rewards: Sequence[float], *, nothing_learned: bool, broken_steps: int
) -> RunVerdict:
    """Judge a run.

    Args:
        report: the content of report.json (`tracking.report`).
        rewards: the finite mean rewards of the steps, in order.
        nothing_learned: whether no step could change the policy (`Findings.nothing_learned`).
        broken_steps: steps whose loss or gradient norm is not finite.
    """
    if not rewards:
        return RunVerdict("empty", "No step is recorded yet.")
    if nothing_learned:
        return RunVerdict("learned nothing", report["findings"][0].partition(";")[0] + ".", "nothing was learned")
    if broken_steps:
        text = f"The loss or the gradient was {NOT_FINITE} in {_steps(broken_steps)}."
        return RunVerdict("unstable", text, NOT_FINITE)
    if (skips := report["skips"] + report["rollbacks"]) > REJECTED_SHARE * len(rewards):
        text = f"The guards rejected {skips:,} batches in {_steps(len(rewards))}."
        return RunVerdict("unstable", text, "rejected batches")
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
    fall = best.mean - last.mean
    if _exceeds(best, last) and fall > max(0.5 * (best.mean - first.mean), _chance(rewards, size, len(starts))):
        text = f"The reward fell from its best mean of {best.mean:.3f}. {figures}"
        return RunVerdict("unstable", text, "the reward fell")
    rose = _exceeds(last, first)
    clear = gain is None or abs(gain) > CLEAR_GAIN[headline_of(report).key]
    if gain is not None and clear and gain < 0:
        return RunVerdict("unstable", f"The held-out result fell. {figures}", "the held-out result fell")
    if rose and not clear:
        return RunVerdict("unclear", f"The training reward rose, the held-out result did not. {figures}")
    if rose or (gain is not None and clear):
        return RunVerdict("learned", figures)
    return RunVerdict("stuck", f"The reward did not rise beyond its noise. {figures}", "the reward did not rise")


def _chance(rewards: Sequence[float], size: int, windows: int) -> float:
    """Return the largest fall likely by chance from the best of `windows` means of `size` steps.

    Noise lifts the best of many means far above the last. The noise of a step is estimated from consecutive steps, so
    that a slow change does not count as noise.
    """
    squares = [(later - earlier) ** 2 for earlier, later in itertools.pairwise(rewards)]
    noise = math.sqrt(statistics.fmean(squares) / 2)
    return (CLEAR * math.sqrt(2) + math.sqrt(2 * math.log(windows))) * noise / math.sqrt(size)


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
