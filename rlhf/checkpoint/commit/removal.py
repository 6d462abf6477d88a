"""Removes checkpoints: renames each to trash first, so that a kill never leaves half a checkpoint under its name."""

import logging
from pathlib import Path

from rlhf.checkpoint.commit.pointer import point_elsewhere
from rlhf.events import announce
from rlhf.storage.files import fsync_dir, remove, rename_durably
from rlhf.storage.layout import TEMPORARY, TRASH, fresh_name

log = logging.getLogger(__name__)


def to_trash(path: Path) -> Path:
    """Rename a directory to trash; return the path to delete."""
    trash = rename_durably(path, path.with_name(fresh_name(TRASH, path.name.lstrip("."))))
    announce("commit.trash")
    return trash


def delete(leftover: Path) -> bool:
    """Delete a path that nothing uses. If the path is busy (open over NFS, a mount), log an error and return False."""
    try:
        remove(leftover)
    except OSError as error:
        log.error("%s could not be removed (%s); the next start tries again.", leftover, error)
        return False
    return True


def discard(path: Path) -> None:
    delete(to_trash(path))


def set_aside(path: Path, reason: str) -> Path:
    """Rename a checkpoint, or a run's records, to `<name>.<reason>-K`, which no scan finds; return the new path."""
    number = 1
    while (target := path.with_name(f"{path.name}.{reason}-{number}")).exists():
        number += 1
    point_elsewhere(path)
    return rename_durably(path, target)


def clean_leftovers(run_dir: Path) -> list[str]:
    """Remove the leftovers of killed saves and removals, and return their names. No save may be in flight."""
    # Promise 11.
    leftovers = [path for path in run_dir.iterdir() if path.name.startswith((TEMPORARY, TRASH))]
    try:
        if leftovers:
            # A killed run may not have synced the rename, and then a power cut would restore the checkpoint's name.
            fsync_dir(run_dir)
    except OSError as error:
        log.error("%s could not be synced (%s); the next start tries again to remove leftovers.", run_dir, error)
        return []
    return [path.name for path in leftovers if delete(path)]
