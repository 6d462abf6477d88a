"""Composes the report of runs as one HTML page without any request to the network.

jinja2 escapes every text. A Content-Security-Policy allows only the page's own style and script, by their hashes, so
that no user's text can run as a script. The plots are static SVG, so they can be printed and read without the script.
"""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from markupsafe import Markup

import rlhf
from rlhf.config.known_settings import SETTINGS
from rlhf.config.overrides import hydra_value
from rlhf.errors import UserError
from rlhf.ranks.run_events import KILLED
from rlhf.storage.files import make_dir, replace_durably
from rlhf.tracking.headline import headline_of
from rlhf.tracking.page import timeline
from rlhf.tracking.page.curves import ACCURACY, PANELS, Curve, Panel, sample_rows
from rlhf.tracking.page.run_facts import Deadline, RunFacts, read_facts
from rlhf.tracking.page.sample_choice import LEVELS
from rlhf.tracking.page.svg import Line, legend, number, plot
from rlhf.tracking.progress import duration

LONGEST_S = 60.0
"""Longest time in seconds for a page."""
SMOOTHING_STEPS = 10
TABLE_ROWS = 9
RELOAD_S = 10


@dataclass(frozen=True)
class Plotted:
    """A plot with its legend, and a table (`heads`, `rows`) of some of its values."""

    title: str
    unit: str
    drawing: Markup
    legend: Markup
    heads: list[str]
    rows: list[list[str]]


def write_page(path: Path, run_dirs: Sequence[Path], deadline_s: float = LONGEST_S) -> None:
    """Write the page of runs into the file `path`. Raises the errors of `page_of`, and OSError."""
    text = page_of(run_dirs, deadline_s)
    make_dir(path.parent)
    replace_durably(path, text.encode(errors="replace"))  # users' names may have lone surrogates


def page_of(run_dirs: Sequence[Path], deadline_s: float = LONGEST_S, *, live: bool = False) -> str:
    """Return the page of runs. With `live`, the page reloads itself until all runs are finished.

    Raises:
        UserError: a folder is not a run directory, two folders are the same, or a file is damaged.
        TimeoutError: after the deadline.
    """
    deadline = Deadline(deadline_s)
    runs, problems = [], []
    for name, run_dir in zip(run_names(run_dirs), run_dirs, strict=True):
        try:
            runs.append(read_facts(name, run_dir, deadline))
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("\n".join(problems))
    return _rendered(runs, reload_s=RELOAD_S if live and any(run.state.state != "finished" for run in runs) else 0)


def run_names(run_dirs: Sequence[Path]) -> list[str]:
    """Return a distinct name for each run: its folder's name, with as many parent folders as make all names distinct.

    Raises:
        UserError: two of the paths are the same directory.
    """
    paths = [path.resolve() for path in run_dirs]
    for i, path in enumerate(paths):
        if path in paths[:i]:
            raise UserError(f"{run_dirs[i]} is the same run as {run_dirs[paths.index(path)]}. Give each run once.")
    depth = 1
    while True:
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
        depth += 1


def _rendered(runs: list[RunFacts], reload_s: int) -> str:
    # Import jinja2 here, because the import is slow and only this function needs it.
    from jinja2 import Environment, PackageLoader

    environment = Environment(loader=PackageLoader("rlhf.tracking.page", "."), autoescape=True, trim_blocks=True)
    style, script = _asset("page.css"), _asset("page.js")
    several = len(runs) > 1
    return environment.get_template("page.html.jinja").render(
        runs=runs,
        several=several,
        title=f"{len(runs)} runs" if several else runs[0].name,
        style=Markup(style),
        script=Markup(script),
        policy=f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'",
        reload_s=reload_s,
        plots=list(_plots(runs)),
        tiles=_tiles,
        duration=duration,
        number=number,
        levels=LEVELS,
        timeline=timeline,
        settings=_settings(runs),
        legend_of_runs=legend([Line(run.name, [], colour) for colour, run in enumerate(runs)]),
        release=rlhf.__version__,
    )


@cache
def _asset(name: str) -> str:
    return (Path(__file__).parent / name).read_text()


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _plots(runs: Sequence[RunFacts]) -> list[Plotted]:
    reward, *others = PANELS
    accuracy = Panel(ACCURACY, (), "share", share=True)
    found = []
    for panel in (reward, accuracy, *others):
        lines: list[tuple[Line, Curve]] = []
        for colour, run in enumerate(runs):
            for series, (label, curve) in enumerate(_curves_of(panel, run)):
                number_of = colour if len(runs) > 1 else series
                name = f"{run.name}: {label}" if len(runs) > 1 else label
                lines.append((Line(name, curve.points(), number_of, series if len(runs) > 1 else 0), curve))
        if lines:
            found.append(_plotted(panel, lines, few=len(runs) == 1))
    return found


def _curves_of(panel: Panel, run: RunFacts) -> list[tuple[str, Curve]]:
    if panel.title == ACCURACY:
        return list(run.curves.accuracies().items())
    shows_reward = headline_of(run.report).metric == "val/reward"
    curves = ((label, metric) for label, metric in panel.curves if metric != "val/reward" or shows_reward)
    return [(label, run.curves.of[metric]) for label, metric in curves if run.curves.of[metric]]


def _plotted(panel: Panel, lines: Sequence[tuple[Line, Curve]], *, few: bool) -> Plotted:
    drawn = [line for line, _ in lines]
    if panel.title == PANELS[0].title:
        drawn = [each for line, curve in lines for each in _with_mean(line, curve, few=few)]
    heads = ["step", *(line.label for line, _ in lines)]
    of_step = [dict(zip(curve.steps, curve.values, strict=True)) for _, curve in lines]
    steps = sorted({step for values in of_step for step in values})
    rows = [
        [f"{steps[i]:,}", *("" if steps[i] not in values else number(values[steps[i]]) for values in of_step)]
        for i in sample_rows(steps, TABLE_ROWS)
    ]
    name = f"{panel.title} over the steps; the table below has values"
    return Plotted(panel.title, panel.unit, plot(drawn, name, share=panel.share), legend(drawn), heads, rows)


def _with_mean(line: Line, curve: Curve, *, few: bool) -> list[Line]:
    """Return a reward as a faint curve and its running mean, or with several runs only the mean."""
    if len(line.points) <= SMOOTHING_STEPS:
        return [line]
    # Compute the mean from `curve`, which has all steps; `line` has only the extremes of a long run.
    points = curve.smoothed(SMOOTHING_STEPS).points()
    mean = Line(f"{line.label} of the last {SMOOTHING_STEPS}", points, line.colour, line.dash)
    return [Line(f"{line.label} of a step", line.points, line.colour, line.dash, faint=True), mean] if few else [mean]


def _tiles(run: RunFacts) -> list[tuple[str, str, str]]:
    """Return the main figures of a run: label, value, and a remark."""
    report, shown, state = run.report, headline_of(run.report), run.state
    total = f"of {state.total_steps:,}" if state.total_steps else ""
    tiles = [("steps", f"{report['steps']:,}", total)]
    before, after = report[f"{shown.key}_before"], report[f"{shown.key}_after"]
    if after is not None:
        remark = "" if before is None else f"{format(before, shown.format)} before"
        tiles.append((shown.label, format(after, shown.format), remark))
    if report["reward"]:
        tiles.append(("reward", f"{report['reward'][-1][1]:.3f}", f"{report['reward'][0][1]:.3f} in the first step"))
    tiles.append(("training time", duration(report["training_seconds"]), ""))
    if report["tokens_per_second"] is not None:
        tiles.append(("tokens per second", f"{report['tokens_per_second']:,.0f}", "median"))
    kills = sum(event.kind == KILLED for event in run.events)
    tiles.append(("restarts", f"{state.restarts + kills:,}", f"{kills} after kills of the whole run" if kills else ""))
    if state.checkpoint is not None:
        tiles.append(("newest checkpoint", f"step {state.checkpoint[0]:,}", ""))
    return tiles


def _settings(runs: Sequence[RunFacts]) -> list[tuple[str, list[str], str, bool]]:
    """Return rows about settings that differ from the default in a run: name, each run's value, default, and whether
    the runs differ."""
    rows = []
    for key, setting in SETTINGS.items():
        values, default = [run.settings[key] for run in runs], _plain(setting.default)
        if any(value not in (default, None) for value in values):
            differs = any(value != values[0] for value in values)
            rows.append((key, [_shown(value) for value in values], _shown(default), differs))
    return rows


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _shown(value: Any) -> str:
    return "null" if value is None else str(hydra_value(value))
