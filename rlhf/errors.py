"""Errors that a restart cannot fix, "Did you mean" for their messages, and the exit codes of the command."""

import difflib
from collections.abc import Iterable

EXIT_DONE = 0
EXIT_CRASHED = 1
EXIT_USER_ERROR = 2
# EX_TEMPFAIL of sysexits.h: SLURM, Kubernetes and batch systems can be told to requeue on it.
EXIT_REQUEUE = 75
NEAR = 0.7
"""Likeness of two words, by difflib's ratio, from which one may be meant by the other."""


class UserError(Exception):
    """A mistake in the settings, the data or the files that only a person can mend.

    The message names the setting, its value and the remedy. It ends the run with `EXIT_USER_ERROR`; it is never
    retried.
    """


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
