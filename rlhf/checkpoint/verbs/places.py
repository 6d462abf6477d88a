"""Finds checkpoints at a path that a user gives, and formats read errors as one line."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rlhf.errors import UserError
from rlhf.storage.disk_errors import DamagedCheckpoint, OtherFormat
from rlhf.storage.layout import MANIFEST, scan, step_of

T = TypeVar("T")
REMOVED = "removed"
"""State of a checkpoint that its run removed while a verb read it."""


def local_folder(text: str) -> Path:
    """Parse a folder on a disk (argparse `type`) for verbs without remote access. Reject a URL, which would otherwise
    become a local folder of that name."""
    if "://" in text:
        raise argparse.ArgumentTypeError(
            f"{text} is a URL. Give a local folder, and copy from or to the URL with the store's own tool"
        )
    return Path(text)


def checkpoints_at(path: Path) -> list[Path]:
    """Return the checkpoint `path`, or the checkpoints in the run directory `path`, newest first.

    Raise UserError if there is none.
    """
    try:
        if step_of(path.absolute()) is not None and path.is_dir():
            return [path]
        if found := scan(path):
            return found
        # Accept a checkpoint that was copied or set aside under another name.
        if (path / MANIFEST).is_file():
            return [path]
        what = "is not a directory" if os.path.lexists(path) else "does not exist"
        what = "has no checkpoint (global_step_N)" if path.is_dir() else what
    except OSError as error:
        what = f"cannot be read ({error.strerror})"
    raise UserError(
        f"{path} {what}. Give a run directory, <default_local_dir>/<project>/<experiment>, or a checkpoint in it."
    )


class Unreadable(str):
    """One line about an unreadable checkpoint or folder; `state` is the checkpoint's state in a table."""

    state: str

    def __new__(cls, line: str, state: str = "damaged") -> "Unreadable":
        made = super().__new__(cls, line)
        made.state = state
        return made


def read_or_problem(path: Path, read: Callable[[], T]) -> T | Unreadable:
    """Return the result of `read`, which reads `path`, or one line about its error."""
    try:
        return read()
    except OtherFormat as error:
        return Unreadable(str(error), "other format")
    except DamagedCheckpoint as error:
        return Unreadable(str(error))
    except OSError as error:
        return Unreadable(f"{error.filename or path} cannot be read: {error.strerror}")
    except UnicodeDecodeError:
        return Unreadable(f"{path} is not valid UTF-8")
