"""Checkpoints at a path that a user names, and one line for whatever cannot be read there."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rlhf.errors import UserError
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.layout import MANIFEST, scan, step_of

T = TypeVar("T")


def add_path(parser: argparse.ArgumentParser) -> None:
    """Give a verb the argument PATH, which `checkpoints_at` takes."""
    parser.add_argument("path", type=Path, metavar="PATH", help="a run directory or a global_step_N directory")


def checkpoints_at(path: Path) -> list[Path]:
    """The checkpoint that `path` is, or those that the run directory `path` holds, newest first."""
    try:
        if step_of(path.absolute()) is not None and path.is_dir():
            return [path]
        if found := scan(path):
            return found
        # A checkpoint that was copied or set aside under another name.
        if (path / MANIFEST).is_file():
            return [path]
        what = "is no directory" if os.path.lexists(path) else "does not exist"
        what = "holds no checkpoint (global_step_N)" if path.is_dir() else what
    except OSError as error:
        what = f"cannot be read ({error.strerror})"
    raise UserError(
        f"{path} {what}. Give a run directory, <default_local_dir>/<project>/<experiment>, or a checkpoint in it."
    )


def looked_at(place: Path, look: Callable[[], T]) -> T | str:
    """The result of `look` at `place`, or one line about why there is none."""
    try:
        return look()
    except DamagedCheckpoint as error:
        return str(error)
    except OSError as error:
        return f"{error.filename or place} cannot be read: {error.strerror}"
    except UnicodeDecodeError:
        return f"{place} holds a text that is none"
