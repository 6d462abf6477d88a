"""Compares runs by their files: a table of their results."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf.printable import text_table
from rlhf.storage.layout import EVENTS, HISTORY, RESOLVED
from rlhf.tracking.headline import ACCURACY, REWARD
from rlhf.tracking.live_state import check_run_dir, damage_as_user_error, ended_state
from rlhf.tracking.progress import duration
from rlhf.tracking.report import summarize


@dataclass(frozen=True)
class RunResult:
    """The results of one run, under the name that users see."""

    name: str
    status: str
    report: Mapping[str, Any]
    """The content that `report/report.json` would have now. Empty if a run of a sweep has no directory."""

    @classmethod
    def read(cls, name: str, run_dir: Path, status: str | None = None) -> "RunResult":
        """Read the results in a run directory. The default of `status` is the run's state.

        Raises:
            UserError: `run_dir` is not a run directory, or its files are damaged.
        """
        check_run_dir(run_dir)
        with damage_as_user_error(run_dir, HISTORY, EVENTS, RESOLVED):
            return cls(name, status or ended_state(run_dir)[0], summarize(run_dir))


def run_table(results: Sequence[RunResult]) -> str:
    """Return a row for each run: steps, reward of the last step, last evaluation, time and status."""
    shown = [each for each in (ACCURACY, REWARD) if any(_evaluated(result, each.key) for result in results)]
    rows = [["run", "steps", "reward", *(each.key.replace("_", " ") for each in shown), "time", "status"]]
    for result in results:
        report = result.report
        rewards = report.get("reward")
        rows.append(
            [
                result.name,
                str(report["steps"]) if report else "-",
                f"{rewards[-1][1]:.3f}" if rewards else "-",
                *(_evaluated(result, each.key, each.format) or "-" for each in shown),
                duration(report["training_seconds"]) if report else "-",
                result.status,
            ]
        )
    return text_table(rows)


def _evaluated(result: RunResult, key: str, form: str = "") -> str:
    value = result.report.get(f"{key}_after")
    return "" if value is None else format(value, form)
