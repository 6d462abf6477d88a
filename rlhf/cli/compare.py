"""python -m rlhf.compare RUN ...: shows the results of runs side by side, from their run directories."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf.cli.command import printed
from rlhf.cli.command_parser import CommandParser
from rlhf.config.compare import MODEL_NAMES, OF_EVALUATIONS
from rlhf.config.known_settings import SETTINGS
from rlhf.config.overrides import hydra_value
from rlhf.errors import UserError
from rlhf.printable import printable_lines
from rlhf.tracking.run_table import RunResult, run_table
from rlhf.tracking.stored_values import stored_values

MOST_SETTINGS = 4
"""A row of the table shows at most this many settings."""
OTHERS = (*MODEL_NAMES, "model.lora.path", *OF_EVALUATIONS)
"""Prefixes of settings to compare besides those of the trajectory. They change results, although a resume accepts
other values of them or compares only the files that they name."""
COMPARED = [key for key, each in SETTINGS.items() if each.metadata["resume"] == "trajectory" or key.startswith(OTHERS)]


def main(argv: list[str] | None = None) -> int:
    """Print the results of the runs. Return the exit code: 0, or 2 if a folder is not a run directory."""
    parser = CommandParser(prog="python -m rlhf.compare", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument("--json", action="store_true", help="print one JSON document with the report of each run")
    arguments = parser.parse_args(argv)
    return printed(lambda: _compare(list(dict.fromkeys(arguments.runs)), as_json=arguments.json))


def _compare(runs: Sequence[Path], *, as_json: bool) -> None:
    results, settings, problems = [], [], []
    for run in runs:
        try:
            results.append(RunResult.read(str(run), run))
            settings.append(stored_values(run))
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
        # Show the runs relative to the folder that contains all of them.
        folder = os.path.commonpath([run.absolute().parent for run in runs]) if len(runs) > 1 else None
        named = [
            RunResult(f"{run.absolute().relative_to(folder) if folder else run} {_shown(different, of_run)}", *rest)
            for run, of_run, rest in zip(runs, settings, ((r.status, r.report) for r in results), strict=True)
        ]
        sys.stdout.write(f"{printable_lines(run_table(named))}\n")


def _shown(keys: Sequence[str], settings: dict[str, Any]) -> str:
    shown = [f"{key}={hydra_value(settings[key])}" for key in keys[:MOST_SETTINGS]]
    more = len(keys) - len(shown)
    return " ".join([*shown, *([f"and {more} more (--json)"] if more else [])])
