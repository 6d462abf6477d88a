"""Publishing and removing whole directories, each by one rename, so that every kill leaves the old state or the new one."""

import logging
from pathlib import Path
from typing import Any

from rlhf.checkpoint.commit.manifest import DOMAINS, Manifest, read_manifest, write_manifest
from rlhf.events import announce
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.files import (
    fsync_tree,
    link,
    make_new_dir,
    remove,
    remove_dir,
    remove_file,
    rename_durably,
    replace_durably,
)
from rlhf.storage.layout import POINTER, TEMPORARY, TRASH, fresh_name, scan, step_dir, step_of

log = logging.getLogger(__name__)


def temporary_name(step: int) -> str:
    """A fresh, unique name for the directory that the checkpoint of `step` is written into."""
    return fresh_name(TEMPORARY, step_dir(Path(), step).name)


def begin(run_dir: Path, step: int) -> Path:
    """A fresh, uniquely named temporary directory for the checkpoint of `step`, beside its final place."""
    temporary = run_dir / temporary_name(step)
    make_new_dir(temporary)
    return temporary


def link_folder(temporary: Path, source: Path, folder: str) -> dict[str, dict[str, Any]] | None:
    """Give the new checkpoint the files of `source`'s `folder` as hard links; returns their entries for the manifest. Those that only
    another storage domain has are left to that one's leader.

    None, with a line in the log and nothing left behind, where that cannot be: another file system, one without hard links, a source that
    is gone. Two published checkpoints may share a file because nobody ever writes into one; the file system's link count keeps it for as
    long as any checkpoint has it, whichever is removed first, so that retention needs to know nothing of it.
    """
    try:
        entries = read_manifest(source).in_folder(folder)
        make_new_dir(temporary / folder)
        here = {name: entry for name, entry in entries.items() if DOMAINS not in entry or (source / name).exists()}
        for name in here:
            announce("commit.link")
            link(source / name, temporary / name)
        return here
    except (OSError, DamagedCheckpoint) as error:
        log.warning("%s cannot be linked from %s and is written instead: %s", folder, source, error)
        unlink_folder(temporary, folder)
        return None


def unlink_folder(temporary: Path, folder: str) -> None:
    """Take back what `link_folder` has done for `folder`, if it has."""
    if (temporary / folder).exists():
        remove_dir(temporary / folder)


def publish(run_dir: Path, temporary: Path, manifest: Manifest) -> Path:
    """Commit: manifest, directories durable, rename into place, parent durable, and only then the pointer.

    Raises FileExistsError when the step is published already: nothing is ever written into a published directory.
    """
    seal(temporary, manifest)
    final = give_name(run_dir, temporary, manifest.step)
    point_to(run_dir, manifest.step)
    announce("commit.published")
    return final


def seal(temporary: Path, manifest: Manifest) -> None:
    """Write the manifest and make all names in the directory durable: from now on one rename publishes it."""
    announce("commit.manifest")
    write_manifest(temporary, manifest)
    fsync_tree(temporary)


def give_name(run_dir: Path, temporary: Path, step: int) -> Path:
    """Give a sealed directory its final name, durably; raises FileExistsError when the step is published already."""
    final = step_dir(run_dir, step)
    announce("commit.rename")
    if final.exists():
        raise FileExistsError(f"{final} exists already; a published checkpoint is never overwritten")
    return rename_durably(temporary, final)


def point_to(run_dir: Path, step: int) -> None:
    """Let the pointer name the checkpoint of `step`."""
    announce("commit.pointer")
    _point_to(run_dir, step)


def to_trash(path: Path) -> Path:
    """Take a directory's name away, so that no kill during its deletion leaves half of it there; returns what to delete."""
    trash = path.with_name(fresh_name(TRASH, path.name.lstrip(".")))
    rename_durably(path, trash)
    announce("commit.trash")
    return trash


def discard(path: Path) -> None:
    """Delete a directory: rename to trash first, then remove."""
    remove(to_trash(path))


def set_aside(path: Path, reason: str) -> Path:
    """Keep a checkpoint that must not be used any more under `global_step_N.<reason>-K`, where no scan finds it."""
    number = 1
    while (target := path.with_name(f"{path.name}.{reason}-{number}")).exists():
        number += 1
    _point_elsewhere(path)
    return rename_durably(path, target)


def clean_leftovers(run_dir: Path) -> list[str]:
    """Remove what killed saves and removals left behind; only for a time when no save is in flight. Returns the names."""
    leftovers = [p for p in run_dir.iterdir() if p.name.startswith((TEMPORARY, TRASH))]
    for path in leftovers:
        remove(path)
    return [p.name for p in leftovers]


def _point_elsewhere(leaving: Path) -> None:
    """Let the pointer name the newest other checkpoint before `leaving` loses its name, so that it never names nothing."""
    others = [path for path in scan(leaving.parent) if path != leaving]
    _point_to(leaving.parent, step_of(others[0]) if others else None)


def _point_to(run_dir: Path, step: int | None) -> None:
    pointer = run_dir / POINTER
    if step is None:
        remove_file(pointer, missing_ok=True)
        return
    try:
        replace_durably(pointer, f"{step}\n")
    except OSError as error:
        # A hint that could not be written (a full disk) does not undo what is published. An old one must not stay: what it names may go.
        log.error("%s could not be written and is removed: %s", pointer, error)
        remove_file(pointer, missing_ok=True)
