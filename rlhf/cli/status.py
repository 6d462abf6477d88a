"""python -m rlhf.status RUN ...: shows what runs do now, and changes nothing in their directories."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from rlhf.cli.command import printed
from rlhf.cli.command_parser import CommandParser, count_of
from rlhf.errors import EXIT_DONE, UserError
from rlhf.printable import WIDTH
from rlhf.tracking.live_state import LiveState, read_state
from rlhf.tracking.page.page import run_names
from rlhf.tracking.page.server import serve
from rlhf.tracking.status_text import status_lines

EVERY_S = 1.0
PLAIN_EVERY_S = 10.0
"""Seconds between two updates with --watch: EVERY_S on a terminal, PLAIN_EVERY_S elsewhere."""


def main(argv: list[str] | None = None) -> int:
    """Show the states of the runs. Return the exit code: 0, or 2 if a folder is not a run directory or is damaged."""
    parser = CommandParser(prog="python -m rlhf.status", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument("--watch", "-w", action="store_true", help="follow the runs until all are finished, or Ctrl-C")
    parser.add_argument("--json", action="store_true", help="print a line of JSON per run")
    parser.add_argument("--serve", action="store_true", help="serve the report page to browsers on this machine")
    port = count_of("a port")
    parser.add_argument("--port", type=port, default=0, metavar="N", help="port for --serve (default: any free port)")
    arguments = parser.parse_args(argv)
    try:
        return printed(lambda: _run(arguments))
    except KeyboardInterrupt:
        sys.stdout.write("\n")
        return EXIT_DONE


def _run(arguments: argparse.Namespace) -> None:
    names = run_names(arguments.runs)
    if arguments.serve:
        serve(arguments.runs, arguments.port)
    elif arguments.watch:
        _watch(names, arguments.runs)
    elif arguments.json:
        for run, state in zip(arguments.runs, _states(arguments.runs), strict=True):
            sys.stdout.write(json.dumps({"run": str(run), **asdict(state)}) + "\n")
    else:
        width = Console().width if sys.stdout.isatty() else WIDTH
        sys.stdout.write(f"{_text(names, _states(arguments.runs), width)}\n")


def _states(runs: Sequence[Path]) -> list[LiveState]:
    states, problems = [], []
    for run in runs:
        try:
            states.append(read_state(run))
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("\n".join(problems))
    return states


def _text(names: Sequence[str], states: Sequence[LiveState], width: int) -> str:
    blocks = ("\n".join(status_lines(name, state, width)) for name, state in zip(names, states, strict=True))
    return "\n\n".join(blocks)


def _watch(names: Sequence[str], runs: Sequence[Path]) -> None:
    """Show the states until all runs are finished. Wait also for crashed and stopped runs, which may start again."""
    console = Console()
    states = _states(runs)
    if not console.is_terminal:
        while True:
            sys.stdout.write(f"{_text(names, states, WIDTH)}\n\n")
            sys.stdout.flush()
            if _all_finished(states):
                return
            time.sleep(PLAIN_EVERY_S)
            states = _states(runs)
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            # Leave the last column free, because some terminals wrap a line that fills it.
            live.update(Text(_text(names, states, console.width - 1)), refresh=True)
            if _all_finished(states):
                return
            time.sleep(EVERY_S)
            states = _states(runs)


def _all_finished(states: Sequence[LiveState]) -> bool:
    return all(state.state == "finished" for state in states)
