"""Errors that a restart cannot fix, "Did you mean" for their messages, and the exit codes of the command."""

import difflib
from collections.abc import Iterable
from pathlib import Path

EXIT_DONE = 0
EXIT_CRASHED = 1
EXIT_USER_ERROR = 2
# EX_TEMPFAIL of sysexits.h: SLURM, Kubernetes and batch systems can be told to requeue on it.
EXIT_REQUEUE = 75
NEAR = 0.7
"""Likeness of two words, by difflib's ratio, from which one may be meant by the other."""


class UserError(Exception):
    """A mistake in the settings, the data or the files that only a user can fix.

    The message names the setting, its value and the remedy. It ends the run with `EXIT_USER_ERROR`; it is never
    retried.
    """


class RunEnded(Exception):
    """A run that was started from Python ended before its time; what happened was logged.

    `exit_code` is the command's: `EXIT_REQUEUE` if it was asked to stop, and the same call goes on; `EXIT_CRASHED` or
    `EXIT_USER_ERROR` if something must be fixed first.
    """

    def __init__(self, exit_code: int, run_dir: Path) -> None:
        goes_on = "The same call goes on from its newest checkpoint." if exit_code == EXIT_REQUEUE else "See its log."
        super().__init__(f"The run in {run_dir} ended with exit code {exit_code}. {goes_on}")
        self.exit_code = exit_code


class Preempted(Exception):
    """The run was asked to stop, has saved and leaves with `EXIT_REQUEUE`."""


class Unsaved(Exception):
    """The run leaves with `EXIT_REQUEUE` and without what it was to save; the message says what, and what is there."""


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice most like `word`, or None when nothing is near."""
    found = difflib.get_close_matches(word, list(choices), n=1, cutoff=NEAR)
    return found[0] if found else None


def did_you_mean(found: str | None) -> str:
    """A nearest choice as the end of a message; empty for None."""
    return f" Did you mean {found}?" if found else ""
