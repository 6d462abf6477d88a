"""python -m rlhf.compare RUN ...: shows the results of runs side by side, from their run directories."""

import json
import os
import sys
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from rlhf.cli.command_parser import CommandParser
from rlhf.config.compare import MODEL_NAMES, OF_EVALUATIONS
from rlhf.config.known_settings import SETTINGS
from rlhf.config.overrides import hydra_value
from rlhf.config.stored import stored_sections
from rlhf.errors import EXIT_DONE, EXIT_USER_ERROR, UserError
from rlhf.printable import printable_lines, write_error
from rlhf.storage.layout import RESOLVED
from rlhf.tracking.run_table import RunResult, run_table, write_plot

MOST_SETTINGS = 4
"""Most settings in a row of the table."""
OTHERS = (*MODEL_NAMES, "model.lora.path", *OF_EVALUATIONS)
"""Prefixes of settings that results depend on, though a resume may change them, or compares the files they name."""
COMPARED = [key for key, each in SETTINGS.items() if each.metadata["resume"] == "trajectory" or key.startswith(OTHERS)]


def main(argv: list[str] | None = None) -> int:
    """Print the results of the runs. Return the exit code: 0, or 2 if a folder is not a run directory."""
    parser = CommandParser(prog="python -m rlhf.compare", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the rewards of all runs into this file")
    parser.add_argument("--json", action="store_true", help="print one JSON document with the report of each run")
    arguments = parser.parse_args(argv)
    try:
        _compare(list(dict.fromkeys(arguments.runs)), arguments.plot, as_json=arguments.json)
    except UserError as error:
        write_error(str(error))
        return EXIT_USER_ERROR
    except BrokenPipeError:  # `| head` has closed the pipe
        sys.stderr.close()
    return EXIT_DONE


def _compare(runs: Sequence[Path], plot: Path | None, *, as_json: bool) -> None:
    results, settings, problems = [], [], []
    for run in runs:
        try:
            results.append(RunResult.read(str(run), run))
            settings.append(_settings(run))
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("\n".join(problems))
    different = [key for key in COMPARED if len({json.dumps(of_run[key]) for of_run in settings}) > 1]
    if as_json:
        document = [
            {
                "run": result.name,
                "status": result.status,
                "settings": {key: of_run[key] for key in different},
                "report": result.report,
            }
            for result, of_run in zip(results, settings, strict=True)
        ]
        sys.stdout.write(json.dumps({"runs": document}, indent=1) + "\n")
    else:
        # Names without the folder that all runs are in.
        folder = os.path.commonpath([run.absolute().parent for run in runs]) if len(runs) > 1 else None
        named = [
            RunResult(f"{run.absolute().relative_to(folder) if folder else run} {_shown(different, of_run)}", *rest)
            for run, of_run, rest in zip(runs, settings, ((r.status, r.report) for r in results), strict=True)
        ]
        sys.stdout.write(f"{printable_lines(run_table(named))}\n")
    if plot is not None:
        _draw(plot, results)


def _settings(run: Path) -> dict[str, Any]:
    """Return the compared settings of a run; None for a setting that its release did not have."""

    def child(tree: Any, name: str) -> Any:
        return tree.get(name) if isinstance(tree, dict) else None

    try:
        sections = stored_sections((run / RESOLVED).read_text())
        settings = {key: reduce(child, key.split("."), sections) for key in COMPARED}
        json.dumps(settings)  # YAML also has dates, which no setting is
    except (TypeError, ValueError, OSError) as error:
        raise UserError(f"{run / RESOLVED} is damaged ({error}).") from None
    return settings


def _shown(keys: Sequence[str], settings: dict[str, Any]) -> str:
    shown = [f"{key}={hydra_value(settings[key])}" for key in keys[:MOST_SETTINGS]]
    more = len(keys) - len(shown)
    return " ".join([*shown, *([f"and {more} more (--json)"] if more else [])])


def _draw(path: Path, results: Sequence[RunResult]) -> None:
    try:
        write_plot(path, results)
    except OSError as error:
        raise UserError(
            f"--plot={path}: cannot be written ({error.strerror}). Name a file in a writable folder."
        ) from None
