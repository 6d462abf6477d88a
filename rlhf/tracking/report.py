"""Summarizes a run as numbers and as a few lines of text."""

import math
import statistics
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rlhf.printable import WIDTH, text_table, wrapped
from rlhf.storage.layout import HISTORY, MANIFEST, scan
from rlhf.tracking.findings import Findings
from rlhf.tracking.headline import ACCURACY, REWARD, headline, headline_of
from rlhf.tracking.history import History, Record
from rlhf.tracking.source_results import source_results

REPORT, PAGE = "report/report.json", "report/report.html"
LABEL = 18
"""Width of the labels in a report's text, in characters."""
POINTS = 10_000
"""Largest number of points of a curve in report.json."""


def read_report(run_dir: Path) -> str:
    """Return the summary of a run for a terminal.

    Reads metrics.jsonl and the newest checkpoint's name, at any time of a run, even without records.
    """
    return report_text(summarize(run_dir), run_dir)


def summarize(run_dir: Path) -> dict[str, Any]:
    """Return the content of `report/report.json`. The same input gives the same content."""
    return _summarize(History(run_dir / HISTORY).records(), _newest_checkpoint(run_dir))


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
    findings, evaluations = Findings(), list[Record]()
    for last in records:
        first = last["step"] if first is None else first
        shown = REWARD if headline(last) == REWARD else shown
        for curve in curves:
            curve.add(last)
        findings.add(last)
        if ACCURACY.metric in last:
            evaluations = [*evaluations[:1], last]  # keep the first and the last
    evaluated = held_out if shown == REWARD else accuracy
    trained = [value for step, value in zip(evaluated.steps, evaluated.values, strict=True) if step]
    return {
        "steps": last["step"],
        "first_step": max(1, first or 1),  # a fork begins after the steps of its source
        "headline": shown.metric,
        f"{shown.key}_before": evaluated.values[0] if 0 in evaluated.steps[:1] else None,
        f"{shown.key}_after": trained[-1] if trained else None,
        "best": max(evaluated.values, default=None) if trained else None,
        "reward": reward.points(),
        "evaluations": evaluated.points(),
        "sources": _sources(evaluations),
        "tokens_per_second": statistics.median(speed.values) if speed.values else None,
        "skips": last.get("guards/skips", 0),
        "rollbacks": last.get("guards/rollbacks", 0),
        "training_seconds": math.fsum(seconds.values),
        "findings": findings.texts(),
        "checkpoint": None if checkpoint is None else str(checkpoint),
    }


def _sources(evaluations: list[Record]) -> dict[str, Any]:
    """Return the steps of the first and last evaluation, and each source's metrics at these steps (None if missing)."""
    found = source_results(evaluations)
    rows = [
        {"data_source": source, "metric": metric, "values": [results.get((source, metric)) for results in found]}
        for source, metric in dict.fromkeys(key for results in found for key in results)
    ]
    return {"steps": [record["step"] for record in evaluations], "results": rows}


def report_text(report: dict[str, Any], run_dir: Path) -> str:
    """Return the text of a summary. Mentions the page if there is one."""
    steps = f"{report['first_step']} to {report['steps']}" if report["first_step"] > 1 else str(report["steps"])
    rows = [("steps", f"{steps} in {report['training_seconds']:.0f} s")]
    shown = headline_of(report)
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
    if (run_dir / PAGE).exists():
        rows.append(("report", f"{run_dir / PAGE} (numbers: report.json)"))
    lines = [f"{label:<{LABEL}} {value}" for label, value in rows]
    for finding in report["findings"]:
        first, *more = wrapped(finding, WIDTH - LABEL - 1)
        lines += [f"{'warning':<{LABEL}} {first}", *(f"{'':<{LABEL}} {line}" for line in more)]
    if report["sources"]["results"]:
        lines += ["", text_table(list(_source_rows(report["sources"])))]
    return "\n".join(lines)


def _source_rows(sources: dict[str, Any]) -> Iterator[list[str]]:
    yield ["data source", "metric", *(f"step {step}" for step in sources["steps"])]
    for row in sources["results"]:
        values = ("-" if value is None else f"{value:.3f}" for value in row["values"])
        yield [row["data_source"], row["metric"], *values]
