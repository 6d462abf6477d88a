"""Compares runs by their files: a table and a plot of their results."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf.errors import UserError
from rlhf.printable import text_table
from rlhf.storage.files import replace_durably
from rlhf.storage.layout import RESOLVED
from rlhf.tracking.headline import ACCURACY, REWARD
from rlhf.tracking.plots import plot_runs
from rlhf.tracking.progress import duration
from rlhf.tracking.report import REPORT, summarize

DONE, UNFINISHED = "done", "unfinished"


@dataclass(frozen=True)
class RunResult:
    """The results of one run, under the name that users see."""

    name: str
    status: str
    report: Mapping[str, Any]
    """The content of `report/report.json`, as of now; empty for a run without a directory."""

    @classmethod
    def read(cls, name: str, run_dir: Path, status: str | None = None) -> "RunResult":
        """Read the results in a run directory. The default of `status` depends on the files.

        Raises:
            UserError: `run_dir` is not a run directory, or its files are damaged.
        """
        if not (run_dir / RESOLVED).is_file():
            if not run_dir.is_dir():
                raise UserError(f"{run_dir}: there is no such folder. Correct the path.")
            remedy = f" Its runs are {run_dir}/*/." if any(run_dir.glob(f"*/{RESOLVED}")) else ""
            raise UserError(f"{run_dir} is not a run directory: it has no {RESOLVED}.{remedy}")
        try:
            report = summarize(run_dir)
            status = status or (DONE if _is_reported(run_dir, report) else UNFINISHED)
        except (TypeError, AttributeError, LookupError, ValueError, OSError, OverflowError, RecursionError) as error:
            raise UserError(f"{run_dir} cannot be read: a file is damaged ({error}).") from None
        return cls(name, status, report)


def _is_reported(run_dir: Path, report: Mapping[str, Any]) -> bool:
    """Return whether the run has written its report, at its end, and has not continued since."""
    path = run_dir / REPORT
    return path.is_file() and json.loads(path.read_text())["steps"] == report["steps"]


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


def write_plot(path: Path, results: Sequence[RunResult]) -> bool:
    """Draw the curves of all runs into a PNG file. Return False, without a file, if no run has a step."""
    if not any(result.report.get("reward") for result in results):
        return False
    replace_durably(path, plot_runs([(result.name, dict(result.report)) for result in results if result.report]))
    return True
