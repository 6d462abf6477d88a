"""python -m rlhf.report RUN ...: writes a page about runs, also while they run or after a crash."""

import sys
from pathlib import Path

from rlhf.cli.command import printed
from rlhf.cli.command_parser import CommandParser, count_of
from rlhf.errors import UserError
from rlhf.printable import printable_lines
from rlhf.tracking.live_state import check_run_dir
from rlhf.tracking.page import write_page
from rlhf.tracking.report import PAGE

TIMEOUT_S = 600


def main(argv: list[str] | None = None) -> int:
    """Write the page of the runs. Return the exit code: 0, or 2 if a folder is not an intact run directory, the page
    takes longer than --timeout, or the page cannot be written."""
    parser = CommandParser(prog="python -m rlhf.report", description=__doc__)
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="a run directory; the curves of several runs are overlaid"
    )
    parser.add_argument(
        "--output",
        "-o",
        type=Path,
        metavar="FILE.html",
        help=f"default: {PAGE} in RUN; runs.html here for several runs",
    )
    parser.add_argument(
        "--timeout",
        type=count_of("seconds", 1),
        default=TIMEOUT_S,
        metavar="S",
        help=f"seconds in which to write the page (default: {TIMEOUT_S})",
    )
    arguments = parser.parse_args(argv)
    return printed(lambda: _report(arguments.runs, arguments.output, arguments.timeout))


def _report(runs: list[Path], output: Path | None, timeout_s: float) -> None:
    for run in runs:
        check_run_dir(run)
    path = output or (runs[0] / PAGE if len(runs) == 1 else Path("runs.html"))
    _write(path, runs, timeout_s)
    sys.stdout.write(f"{printable_lines(str(path))}\n")


def _write(path: Path, runs: list[Path], timeout_s: float) -> None:
    try:
        write_page(path, runs, timeout_s)
    except TimeoutError as error:
        raise UserError(f"--timeout={timeout_s}: {error}. Set a larger --timeout, or give fewer runs.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}). Give --output=FILE.html.") from None
