"""Checks the disk of a run directory: speed, room for checkpoints, file locks."""

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlhf.checkpoint.save.disk_space import bytes_freed_by
from rlhf.diagnosis.check_result import Outcome, error, ok, warning
from rlhf.planning.checkpoint_size import CheckpointSize
from rlhf.planning.plan_text import gib
from rlhf.ranks.lock import lock_if_free
from rlhf.ranks.memory_folder import free_bytes
from rlhf.storage.files import append_durably, remove_file
from rlhf.storage.layout import TEMPORARY, scan

TEST_BYTES = 16 << 20
SLOW_SYNC_S = 1.0
"""Seconds above which a small sync is slow, because a run syncs a few small files in each step."""
SETTING = "trainer.default_local_dir"


def existing_folder(run_dir: Path) -> Path:
    """Return the run directory, or its nearest parent that exists."""
    return next(folder for folder in (run_dir, *run_dir.absolute().parents) if folder.is_dir())


@contextmanager
def probe_file(folder: Path) -> Iterator[Path]:
    """Yield the path of a new file in `folder`, and remove the file afterwards. Runs ignore a file left behind."""
    path = folder / f"{TEMPORARY}doctor-{uuid.uuid4().hex}"
    try:
        yield path
    finally:
        remove_file(path, missing_ok=True)


def check_disk(run_dir: Path, size: CheckpointSize | None, share: float, timeout_s: float) -> Iterator[Outcome]:
    """Check the disk of the run directory.

    Args:
        size: size of a checkpoint; None if unknown.
        share: fraction of each checkpoint that this node's disk stores.
        timeout_s: `checkpoint.timeout_s`.
    """
    folder = existing_folder(run_dir)
    if blocked := [path for path in (run_dir, *run_dir.absolute().parents) if path.exists() and not path.is_dir()]:
        yield error(f"{blocked[0]} is a file. Remove it, or set {SETTING} to another folder.")
        return
    try:
        with probe_file(folder) as path:
            append_durably(path, [b""])
            speed, sync_s = measure(path)
        with probe_file(folder) as path, lock_if_free(path, SETTING):
            pass  # raises UserError if the file system has no locks
    except OSError as problem:
        yield error(
            f"{folder} is not writable: {problem.strerror}. Fix this, or set {SETTING} to a writable folder with free "
            "space."
        )
        return
    found = list(speed_problems(folder, speed, sync_s, size, share, timeout_s))
    free, present = free_bytes(folder), scan(run_dir)
    if size is not None and free is not None:
        found += room_problems(folder, size, share, free, len(present), bytes_freed_by(present))
    yield from found
    if not found:
        room = "no limit" if free is None else f"{gib(free)} free"
        needs = "unknown" if size is None else gib(int(size.total * share))
        yield ok(f"{folder}: {room}, a checkpoint needs {needs}; writes {speed / 1e6:,.0f} MB/s, locks work")


def measure(path: Path) -> tuple[float, float]:
    """Return the bytes per second of a write with sync to the file `path`, and the seconds of a small write."""
    block = os.urandom(1 << 20)  # some file systems compress
    begin = time.perf_counter()
    append_durably(path, [block] * (TEST_BYTES // len(block)))
    middle = time.perf_counter()
    append_durably(path, [block[:4096]])
    return TEST_BYTES / (middle - begin), time.perf_counter() - middle


def speed_problems(
    folder: Path, speed: float, sync_s: float, size: CheckpointSize | None, share: float, timeout_s: float
) -> Iterator[Outcome]:
    """Yield a finding if a checkpoint takes longer than `checkpoint.timeout_s`, or syncs are slow."""
    if size is not None and (seconds := size.total * share / speed) > timeout_s:
        yield error(
            f"{folder} writes {speed / 1e6:.1f} MB/s, so a checkpoint of {gib(int(size.total * share))} takes "
            f"{seconds:,.0f} s, longer than checkpoint.timeout_s={timeout_s:g}. Set {SETTING} to a faster disk, or "
            "raise checkpoint.timeout_s."
        )
    elif sync_s > SLOW_SYNC_S:
        yield warning(
            f"{folder} needs {sync_s:.1f} s to sync 4 KiB, and a run syncs small files in each step. Set {SETTING} to "
            "a faster disk."
        )


def room_problems(
    folder: Path, size: CheckpointSize, share: float, free: int, count: int, present: int
) -> Iterator[Outcome]:
    """Yield a finding if the disk has no room for the next checkpoint, or for all checkpoints that the run keeps.

    Args:
        free: free bytes of the disk.
        count: number of checkpoints of this run on the disk.
        present: bytes that these checkpoints occupy.
    """
    one, kept = int(size.total * share), size.max_to_keep
    needed = one * (1 if kept is None else kept + 1)
    removable = one if kept is not None and count >= kept else 0
    remedy = f"Free space, set {SETTING} to a larger disk, or lower checkpoint.max_to_keep."
    if free + removable < one:
        yield error(f"{folder} has {gib(free)} free, and the next checkpoint needs {gib(one)}. {remedy}")
    elif free + present < needed:
        what = f"{kept} checkpoints and the next one need {gib(needed)}"
        yield warning(f"{folder} has {gib(free)} free and {gib(present)} in checkpoints, and {what}. {remedy}")
