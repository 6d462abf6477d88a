"""python -m rlhf.report RUN ...: writes a page about runs, also while they run or after a crash."""

import sys
from pathlib import Path

from rlhf.cli.command_parser import CommandParser, count_of
from rlhf.errors import EXIT_DONE, EXIT_USER_ERROR, UserError
from rlhf.printable import printable_lines, write_error
from rlhf.tracking.live_state import check_run_dir
from rlhf.tracking.page import write_page
from rlhf.tracking.report import PAGE

TIMEOUT_S = 600


def main(argv: list[str] | None = None) -> int:
    """Write the page of the runs. Return the exit code: 0, or 2 if a folder is not an intact run directory, the page
    takes longer than --timeout, or the page cannot be written."""
    parser = CommandParser(prog="python -m rlhf.report", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run directory; several are overlaid")
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
        help=f"time for the page, default: {TIMEOUT_S}",
    )
    arguments = parser.parse_args(argv)
    runs: list[Path] = arguments.runs
    try:
        for run in runs:
            check_run_dir(run)
        path = arguments.output or (runs[0] / PAGE if len(runs) == 1 else Path("runs.html"))
        _write(path, runs, arguments.timeout)
    except UserError as error:
        write_error(str(error))
        return EXIT_USER_ERROR
    sys.stdout.write(f"{printable_lines(str(path))}\n")
    return EXIT_DONE


def _write(path: Path, runs: list[Path], timeout_s: float) -> None:
    try:
        write_page(path, runs, timeout_s)
    except TimeoutError as error:
        raise UserError(f"--timeout={timeout_s}: {error}. Raise the time, or give fewer runs.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}). Give --output=FILE.html.") from None
