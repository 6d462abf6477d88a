"""Defines errors that end a run without a restart, hints for messages, and the exit codes of the command."""

import difflib
from collections.abc import Callable, Iterable
from pathlib import Path

EXIT_DONE = 0
EXIT_CRASHED = 1
EXIT_USER_ERROR = 2
# EX_TEMPFAIL of sysexits.h. SLURM, Kubernetes and batch systems can requeue on it.
EXIT_REQUEUE = 75
NEAR = 0.7
"""Smallest similarity (difflib's ratio) of a misspelled word and the right word."""


class UserError(Exception):
    """A mistake in the settings, the data or the files that only a user can fix.

    The message names the setting, its value and the remedy. The run ends with `EXIT_USER_ERROR`, without a restart.
    """


class RunEnded(Exception):
    """A run that was started from Python ended early, for the reason in its log.

    `exit_code` is `EXIT_REQUEUE` after a request to stop, or if a remote copy is missing. The same call with these
    `changes` of the settings then continues the run. Otherwise `exit_code` is `EXIT_CRASHED` or `EXIT_USER_ERROR`, and
    the user must fix something first.
    """

    def __init__(self, exit_code: int, run_dir: Path, changes: str = "") -> None:
        then = f"The same call{changes} continues the run." if exit_code == EXIT_REQUEUE else "See its log."
        super().__init__(f"The run in {run_dir} ended with exit code {exit_code}. {then}")
        self.exit_code = exit_code


class Preempted(Exception):
    """The run has saved after a request to stop, and exits with `EXIT_REQUEUE`."""


class Unsaved(Exception):
    """The run exits with `EXIT_REQUEUE`, and a save or a remote copy is missing.

    The message names the missing save or copies, and the effect of running the same command again.
    """


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """Return the choice most similar to `word`, or None if no choice is near.

    Choices with the same set of letters come first: letters in another order, or a letter typed twice.
    """
    known = list(choices)
    same = [choice for choice in known if set(choice) == set(word) and abs(len(choice) - len(word)) <= 1]
    found = difflib.get_close_matches(word, same, n=1, cutoff=0) or difflib.get_close_matches(word, known, 1, NEAR)
    return found[0] if found else None


def nearest_path(path: Path, is_right: Callable[[Path], bool]) -> str | None:
    """Return the path most similar to `path` that satisfies `is_right`, or None if no path is near.

    The nearest name in the same folder replaces each name that does not exist.
    """
    found = Path(path.anchor)
    for number, part in enumerate(names := path.parts[bool(path.anchor) :], 1):
        fits = is_right if number == len(names) else Path.is_dir
        if not fits(found / part):
            try:
                near = nearest(part, [other.name for other in found.iterdir() if fits(other)])
            except OSError:
                return None
            if near is None:
                return None
            part = near
        found /= part
    return str(found)


def did_you_mean(found: str | None) -> str:
    """Return the sentence that ends a message and suggests `found`; empty for None."""
    return f" Did you mean {found}?" if found else ""


def nearby(path: Path, is_right: Callable[[Path], bool]) -> str:
    """Return the last sentence of a message about a missing path.

    The sentence suggests the nearest path, or asks to correct the path.
    """
    return did_you_mean(nearest_path(path, is_right)) or " Correct the path."
