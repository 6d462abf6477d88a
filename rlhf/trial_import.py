"""Import of the user's files in a process of its own, so that what they raise is told before the ranks need them.

`python -m rlhf.trial_import SETTING=FILE.py:NAME ...` writes the first UserError, if there is one, to its stdout.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence

from rlhf.errors import UserError
from rlhf.user_functions import load_function

DEADLINE_S = 60.0
"""Seconds after which the start goes on without knowing: the ranks import the file again."""
_LAST_WORDS = 2000


@contextlib.contextmanager
def trial_import(functions: Sequence[tuple[str, str]]) -> Iterator[None]:
    """Import the functions, each a setting with its `FILE.py:NAME`, while the body runs, as the ranks will.

    Raises:
        UserError: after the body, for a file that cannot be imported or ends its process.
    """
    if not functions:
        yield
        return
    named = [f"{setting}={spec}" for setting, spec in functions]
    process = subprocess.Popen(
        [sys.executable, "-m", "rlhf.trial_import", *named],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        yield
        with contextlib.suppress(subprocess.TimeoutExpired):
            said, words = process.communicate(timeout=DEADLINE_S)
            if said:
                raise UserError(said)
            if process.returncode:
                raise UserError(
                    f"{', '.join(named)}: the process that imported it ended with exit code {process.returncode}. "
                    f"Correct the file.\n{words[-_LAST_WORDS:]}".rstrip()
                )
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def main(named: Sequence[str]) -> None:
    """Import each of them, in order."""
    told = os.dup(1)
    os.dup2(2, 1)  # what the files print is none of the answer
    for each in named:
        setting, _, spec = each.partition("=")
        try:
            load_function(setting, spec)
        except UserError as error:
            os.write(told, str(error).encode())
            return


if __name__ == "__main__":
    main(sys.argv[1:])
