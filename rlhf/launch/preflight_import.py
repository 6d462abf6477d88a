"""Imports the user's files in a separate process, to report their errors before the ranks start.

`python -m rlhf.launch.preflight_import SETTING=FILE.py:NAME ...` writes the first UserError, if any, to its stdout.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from threading import Thread
from typing import IO

from rlhf.config.user_functions import load_function
from rlhf.errors import UserError
from rlhf.ranks.parent import PARENT_PID, die_with_parent

DEADLINE_S = 60.0
"""Seconds after which the run starts without the result; the ranks import the files anyway."""
_SHOWN_CHARACTERS = 2000
_JOIN_TIMEOUT_S = 2.0
"""Seconds to wait for the last output of a process that has ended."""


@contextlib.contextmanager
def preflight_import(functions: Sequence[tuple[str, str]]) -> Iterator[None]:
    """Import `functions`, pairs of a setting and its value `FILE.py:NAME`, in another process during the `with` body.

    Raises:
        UserError: after the body, if a file cannot be imported or its import ends the process.
    """
    if not functions:
        yield
        return
    named = [f"{setting}={spec}" for setting, spec in functions]
    process = subprocess.Popen(
        [sys.executable, "-m", "rlhf.launch.preflight_import", *named],
        env=os.environ | {PARENT_PID: str(os.getpid())},
        bufsize=0,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    answer, output = _PipeReader(process.stdout), _PipeReader(process.stderr)
    try:
        yield
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=DEADLINE_S)
            if message := answer.text():
                raise UserError(message)
            if process.returncode:
                raise UserError(
                    f"{', '.join(named)}: the import ended its process with exit code {process.returncode}. "
                    f"Correct the file.\n{output.text()[-_SHOWN_CHARACTERS:]}".rstrip()
                )
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class _PipeReader:
    """Reads a pipe in a thread and stores the last 64 reads.

    Does not wait for the end of the pipe: a process that the imported file started may keep the pipe open forever.
    """

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe, self._parts = pipe, deque[bytes](maxlen=64)
        self._thread = Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with self._pipe as pipe:
            while part := pipe.read(1 << 16):
                self._parts.append(part)

    def text(self) -> str:
        self._thread.join(_JOIN_TIMEOUT_S)
        return b"".join(tuple(self._parts)).decode(errors="replace")


def main(named: Sequence[str]) -> None:
    """Import each `SETTING=FILE.py:NAME` in order, and write the first UserError to stdout."""
    die_with_parent()  # an import may never end
    stdout = os.dup(1)
    os.dup2(2, 1)  # the files print to stderr, so that stdout has the UserError alone
    for each in named:
        setting, _, spec = each.partition("=")
        try:
            load_function(setting, spec)
        except UserError as error:
            os.write(stdout, str(error).encode())
            return


if __name__ == "__main__":
    main(sys.argv[1:])
