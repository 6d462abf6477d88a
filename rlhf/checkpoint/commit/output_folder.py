"""Writes a verb's output folder under a temporary name, then renames it, so that no process reads half a folder."""

import errno
import os
import re
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rlhf.checkpoint.commit.manifest import describe, read_manifest
from rlhf.checkpoint.commit.removal import delete
from rlhf.errors import UserError
from rlhf.events import announce
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.files import (
    WrittenFile,
    exchange,
    fsync_dir,
    fsync_files,
    fsync_tree,
    make_dir_durably,
    make_new_dir,
    remove,
    remove_dir,
    rename,
)
from rlhf.storage.layout import MANIFEST, fresh_name, scan, step_of
from rlhf.storage.reading import CheckedFiles
from rlhf.storage.scratch import lock_folder

INCOMPLETE = ".incomplete-"
"""Prefix of a folder that is being written, was left by a killed process, or was replaced and is being removed."""
REPLACED = ".replaced-"
"""Prefix of a replaced folder where the file system cannot exchange two names in one step."""
EARLIER = ".earlier-"
"""Suffix of an earlier output that could not get the target's name back. No command removes this folder."""


@contextmanager
def output_folder(target: Path, *, overwrite: bool = False, sources: Iterable[Path] = ()) -> Iterator[Path]:
    """Yield an empty folder that becomes `target`, durably, when the block ends.

    First removes leftovers of killed processes. Removes the folder if the block raises. `overwrite` replaces an earlier
    `target`. Raises UserError before anything is written when `target` has content (without `overwrite`), when
    `check_target` rejects `target`, or when another process is writing `target`.
    """
    target = target.absolute()
    check_target(target, overwrite, sources)
    make_dir_durably(target.parent)
    if not remove_leftovers(target):
        raise UserError(f"{target} is being written by another process. Wait for it, or give another target.")
    check_target(target, overwrite, sources)  # check again: the removal may have restored an earlier target
    folder, lock = _create_locked(target)
    made = folder.stat().st_ino
    try:
        announce("target.begin")
        yield folder
        _publish(folder, target, overwrite)
    except BaseException as error:
        # If an exchange was not undone, `folder` now names the earlier output: do not remove it.
        if folder.exists() and folder.stat().st_ino == made:
            remove_dir(folder, ignore_errors=True)
        if isinstance(error, OSError) and error.filename is not None:  # names a folder that is gone
            error.filename = str(error.filename).replace(str(folder), str(target))
        raise
    finally:
        if lock is not None:
            os.close(lock)


def verify_written(root: Path, written: Iterable[WrittenFile]) -> None:
    """Read back the files `written` below `root`; raise DamagedCheckpoint with the name of a file that differs."""
    described = describe(list(written))
    files = CheckedFiles(root, described)
    for name in described:
        try:
            files.check_entry(name)
            files.verify_blocks(name, files.blocks(name))
        except DamagedCheckpoint as error:
            raise DamagedCheckpoint(f"{root / name} was not written correctly, try again: {error}") from None


def check_target(target: Path, overwrite: bool, sources: Iterable[Path]) -> None:
    target = target.absolute()
    real = target.resolve()
    for source in [path.resolve() for path in sources]:
        if real == source or real in source.parents:
            raise UserError(f"{target} contains the source {source}. Give another target.")
    for parent in real.parents:
        if (parent / MANIFEST).is_file():
            raise UserError(f"{target} is in the checkpoint {parent}, which never changes. Give another target.")
    there = next(parent for parent in target.parents if parent.is_symlink() or parent.exists())
    if not there.is_dir():
        raise UserError(f"{there} is not a folder, so {target} cannot be created in it. Give another target.")
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise UserError(f"{target} is not a folder. Give another target.")
    if target.is_dir() and any(target.iterdir()) and not overwrite:
        raise UserError(f"{target} exists already. Give another target, or --overwrite to replace it.")
    if real in (Path.cwd(), *Path.cwd().parents, Path.home()) or target.is_mount():
        raise UserError(
            f"{target} must not be replaced: it is your home folder, a mount point, or contains the working directory. "
            "Give a new folder in it."
        )
    if overwrite and (found := _find_checkpoint(target)) is not None:
        raise UserError(
            f"{found} is a checkpoint of a run, which --overwrite does not replace. Give another target, or remove it "
            "yourself."
        )


def _find_checkpoint(target: Path) -> Path | None:
    """Return a checkpoint that a run has saved: `target` itself, or one up to three folders below it."""
    if (target / MANIFEST).is_file() and step_of(target) is not None:
        try:
            return None if read_manifest(target).imported else target
        except DamagedCheckpoint:
            return target
    folders = [target, *target.glob("*"), *target.glob("*/*")]
    return next((path for folder in folders for path in scan(folder) if (path / MANIFEST).is_file()), None)


def step_named(target: Path, source: Path) -> int:
    """Return the step in the name of `target`. If the name has no step, raise UserError, and suggest the step in the
    name of `source`."""
    step = step_of(target.absolute())
    if step is None:
        found = re.search(r"(?:step|iter|checkpoint)[-_]0*(\d+)(/[^/]*)?$", str(source.absolute()))
        known = found[1] if found else 0
        raise UserError(
            f"{target} must be named global_step_N, where N is the step after which a run begins: give "
            f"{target / f'global_step_{known}'}, or another step."
        )
    return step


def remove_leftovers(target: Path) -> bool:
    """Remove leftovers of killed processes, or rename one to a missing `target`; return False if a writer is alive."""
    name = re.compile(rf"({re.escape(INCOMPLETE)}|{re.escape(REPLACED)}){re.escape(target.name)}-[0-9a-f]{{12}}")
    # Sort `.incomplete-` before `.replaced-`: a living writer needs both folders, but locks only the first.
    for leftover in sorted(path for path in target.parent.iterdir() if name.fullmatch(path.name)):
        try:
            lock = lock_folder(leftover)
        except OSError:  # a file system without locks
            _clear(leftover, target)
            continue
        if lock is None and leftover.exists():
            return False
        if lock is not None:
            _clear(leftover, target)
            os.close(lock)
    return True


def is_only_output(leftover: Path) -> bool:
    """Return whether `leftover` is a replaced folder without a target: a kill came between the two renames."""
    target = leftover.name.removeprefix(REPLACED).rpartition("-")[0]
    return leftover.name.startswith(REPLACED) and not leftover.with_name(target).exists()


def _clear(leftover: Path, target: Path) -> None:
    if is_only_output(leftover):
        rename(leftover, target)
    else:
        remove(leftover)


def _create_locked(target: Path) -> tuple[Path, int | None]:
    """Create and lock a folder beside `target`; while the lock is held, other processes know that the
    writer is alive. Return the folder, and the lock's file descriptor (None on a file system without locks)."""
    while True:
        folder = target.parent / fresh_name(INCOMPLETE, target.name)
        try:
            make_new_dir(folder)
        except OSError as error:
            error.filename = str(target)
            raise
        try:
            lock = lock_folder(folder)
        except OSError:
            return folder, None
        if lock is not None:  # None: another process has just removed the folder as a leftover
            return folder, lock


def _publish(folder: Path, target: Path, overwrite: bool) -> None:
    fsync_files(folder)
    fsync_tree(folder)
    announce("target.synced")
    replaced = None
    try:
        if overwrite and target.is_dir():
            if exchange(folder, target):
                replaced = folder
            else:  # between the two renames, the target does not exist
                replaced = rename(target, target.parent / fresh_name(REPLACED, target.name))
            announce("target.replaced")
        if replaced != folder:
            rename(folder, target)
        fsync_dir(target.parent)
    except BaseException as error:
        if replaced is not None:
            _put_back(replaced, folder, target, error)
        raise
    announce("target.published")
    if replaced is not None:
        delete(replaced)  # the output is there, so ignore a failure


def _put_back(replaced: Path, folder: Path, target: Path, reason: BaseException) -> None:
    """Give the earlier output its name again, because the new output may not survive a power cut.

    Raises OSError with the paths of both outputs if the rename fails.
    """
    try:
        if replaced == folder:
            if not exchange(folder, target):
                raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
            return
        if target.exists():
            rename(target, folder)
        rename(replaced, target)
    except OSError as error:
        earlier = target.with_name(f"{target.name}{EARLIER}{uuid.uuid4().hex[:12]}")
        try:
            rename(replaced, earlier)
        except OSError:
            earlier = replaced
        new = f"The new output is in {target}" if target.exists() else "There is no new output"
        why = str(reason) or type(reason).__name__
        message = f"could not be replaced durably ({why}). {new}; the earlier one is in {earlier} ({error.strerror})"
        raise OSError(error.errno, message, str(target)) from reason
