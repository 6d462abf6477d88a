"""Runs the main functions of commands, and turns their errors into exit codes. Imports nothing slow."""

import logging
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from rlhf.errors import EXIT_DONE, EXIT_USER_ERROR, UserError
from rlhf.printable import printable_output, write_error
from rlhf.ranks.open_files import open_closed_streams, raise_open_files
from rlhf.ranks.stop import exit_on_stop_signal


def begin() -> None:
    """Prepare streams and signals of the process. Call this before slow imports.

    Later, the supervisor or the rank handles the signals.
    """
    open_closed_streams()
    exit_on_stop_signal()


def guarded(run: Callable[[list[str]], int], argv: list[str] | None) -> int:
    """Return the exit code of `run`. Report a user's mistake as one message on stderr."""
    raise_open_files()
    from rlhf.config.redaction import Redaction  # slow to import, so not before `begin`

    try:
        return run(sys.argv[1:] if argv is None else argv)
    except UserError as error:
        write_error(Redaction(os.environ)(printable_output(str(error))))
        return EXIT_USER_ERROR


def printed(show: Callable[[], None]) -> int:
    """Call `show`, which prints a command's output, and return the exit code. Report a user's mistake on stderr."""
    try:
        show()
    except UserError as error:
        write_error(str(error))
        return EXIT_USER_ERROR
    except BrokenPipeError:  # `| head` has closed the pipe
        sys.stderr.close()
    return EXIT_DONE


def leave(code: int) -> NoReturn:
    """End the process. A rank skips the exit handlers, as in worker.py."""
    if "RANK" in os.environ:
        # Threads of the process group may abort a process that ends with sys.exit.
        logging.shutdown()
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)
