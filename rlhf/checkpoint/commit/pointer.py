"""Writes the pointer file, which names the newest step for users and tools.

The pointer is only a hint: a resume scans the directory for checkpoints. But a start raises UserError if there is a
pointer and no checkpoint.
"""

import logging
from pathlib import Path

from rlhf.storage.files import fsync_dir, remove_file_durably, replace_durably
from rlhf.storage.layout import POINTER, scan, step_of

log = logging.getLogger(__name__)


def read_pointer(run_dir: Path) -> int | None:
    try:
        return int((run_dir / POINTER).read_text())
    except (OSError, ValueError):
        return None


def point_to(run_dir: Path, step: int | None) -> None:
    """Write `step` into the pointer; None removes it. After a failed write, log an error and remove the pointer."""
    pointer = run_dir / POINTER
    if step is None:
        remove_file_durably(pointer)
        return
    try:
        replace_durably(pointer, f"{step}\n")
    except OSError as error:
        # A full disk does not undo the publication. An old pointer must not stay: retention may remove its checkpoint.
        log.error("%s could not be written and is removed: %s", pointer, error)
        remove_file_durably(pointer)


def point_elsewhere(leaving: Path) -> None:
    """Write the newest checkpoint except `leaving` into the pointer, before `leaving` loses its name."""
    others = [path for path in scan(leaving.parent) if path != leaving]
    point_to(leaving.parent, step_of(others[0]) if others else None)


def point_to_newest(run_dir: Path) -> None:
    """Point to the newest checkpoint. After a kill, the pointer may name a step that retention removes."""
    newest = next((step_of(path) for path in scan(run_dir)), None)
    if read_pointer(run_dir) != newest:
        # A killed run may not have synced the checkpoint's name, and then a power cut would leave only the pointer.
        fsync_dir(run_dir)
        point_to(run_dir, newest)
