"""Pointer file: names the newest step, for people and tools.

It is a hint; what a scan of the directory finds is the truth.
"""

import logging
from pathlib import Path

from rlhf.storage.files import fsync_dir, remove_file_durably, replace_durably
from rlhf.storage.layout import POINTER, scan, step_of

log = logging.getLogger(__name__)


def pointed(run_dir: Path) -> int | None:
    """The step that the pointer names; None when it names none."""
    try:
        return int((run_dir / POINTER).read_text())
    except (OSError, ValueError):
        return None


def point_to(run_dir: Path, step: int | None) -> None:
    """Let the pointer name the checkpoint of `step`, or nothing.

    When it cannot be written it is removed, with a line in the log; raises OSError when that fails as well.
    """
    pointer = run_dir / POINTER
    if step is None:
        remove_file_durably(pointer)
        return
    try:
        replace_durably(pointer, f"{step}\n")
    except OSError as error:
        # A hint that could not be written (a full disk) does not undo what is published. An old one must not stay: what
        # it names may go.
        log.error("%s could not be written and is removed: %s", pointer, error)
        remove_file_durably(pointer)


def point_elsewhere(leaving: Path) -> None:
    """Let the pointer name the newest other checkpoint before `leaving` loses its name, so that it is never wrong."""
    others = [path for path in scan(leaving.parent) if path != leaving]
    point_to(leaving.parent, step_of(others[0]) if others else None)


def point_to_newest(run_dir: Path) -> None:
    """Let the pointer name the newest checkpoint by a scan: a kill between a commit and its pointer has left one that
    names another, which retention may remove."""
    newest = next((step_of(path) for path in scan(run_dir)), None)
    if pointed(run_dir) != newest:
        # The kill may have come before the checkpoint's name was durable: a power cut would leave the pointer alone.
        fsync_dir(run_dir)
        point_to(run_dir, newest)
