"""Locks of the run directory: one supervisor writes into it, and no rank of an earlier one is left when ranks start.

Both are `flock`s: the kernel lets go of them when their process ends, however it ends, so there is never a stale lock
to clean.
"""

import errno
import fcntl
import json
import logging
import os
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from rlhf.errors import UserError
from rlhf.ranks.coordinator import Coordinator

RUN_LOCK = "run.lock"
RANKS_LOCK = "ranks.lock"
LOOKS, LOOK_AGAIN_S = 4, 0.25
ANOTHER_DIRECTORY = "Wait for it or stop it, or give this run a directory of its own with trainer.experiment_name=NAME."

log = logging.getLogger(__name__)


def _lock(path: Path, operation: int, setting: str = "trainer.default_local_dir", fd: int | None = None) -> int | None:
    """The locked file descriptor (not inherited by children that exec), or None when another process holds the lock.
    `fd` has another kind of lock so far, which it loses in any case."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644) if fd is None else fd
    try:
        fcntl.flock(fd, operation)
    except OSError as error:
        os.close(fd)
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return None
        if error.errno in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
            raise UserError(
                f"The file system of {path.parent} has no file locks ({error.strerror}), so two runs could write into "
                f"one directory. Mount it with locks (Lustre: the `flock` option), or set another {setting}."
            ) from error
        raise
    return fd


@contextmanager
def lock_if_free(path: Path, setting: str) -> Iterator[bool]:
    """Hold the file `path` alone, unless another process does; yields whether it is held.

    Raises UserError, naming the `setting` that `path` follows from, where there are no locks.
    """
    fd = _lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB, setting)
    try:
        yield fd is not None
    finally:
        if fd is not None:
            os.close(fd)


@contextmanager
def run_lock(run_dir: Path, remedy: str = ANOTHER_DIRECTORY) -> Iterator[None]:
    """Hold the run directory alone; raises UserError at once, with `remedy`, when another run holds it."""
    # Promise 12.
    fd = _take(run_dir)
    if fd is None:
        raise _refusal(run_dir, remedy)
    try:
        yield
    finally:
        os.close(fd)


@contextmanager
def run_lock_together(run_dir: Path, coordinator: Coordinator) -> Iterator[None]:
    """Hold the run directory, or each of them where nodes have disks of their own, for all ranks of one launch.
    Collective.

    Of the ranks that see one directory the first to come takes its lock; the others find in it that it is one of them,
    and share it then: it is free when the last of them has left or died.

    Raises UserError on every rank, with nothing written but the lock's own file, when another run holds one.
    """
    if coordinator.world_size == 1:
        with run_lock(run_dir):
            yield
        return
    launch = coordinator.broadcast(uuid.uuid4().hex)
    fd: int | None = None

    def take() -> None:
        nonlocal fd
        fd = _take(run_dir, launch)

    def look() -> None:
        if fd is None and not _is_of(launch, run_dir):
            raise _refusal(run_dir)

    def share() -> None:
        nonlocal fd
        fd = _lock(run_dir / RUN_LOCK, fcntl.LOCK_SH | fcntl.LOCK_NB, fd=fd)
        if fd is None:
            raise _refusal(run_dir)

    try:
        coordinator.everywhere(take)
        coordinator.everywhere(look)
        took = fd is not None
        coordinator.everywhere(lambda: share() if took else None)
        coordinator.everywhere(lambda: None if took else share())
        yield
    finally:
        if fd is not None:
            os.close(fd)


def _take(run_dir: Path, launch: str = "") -> int | None:
    """The descriptor of the run lock, which tells who holds it, or None when somebody else does."""
    fd = _lock(run_dir / RUN_LOCK, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if fd is None:
        return None
    holder = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started": datetime.now().isoformat(" ", "seconds"),
        "launch": launch,
    }
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps(holder).encode(), 0)
        os.fsync(fd)  # so that other nodes see it
    except OSError:
        os.close(fd)
        raise
    return fd


def _is_of(launch: str, run_dir: Path) -> bool:
    """Whether a rank of this launch holds the lock, which a network file system may show late."""
    for look in range(LOOKS):
        if look:
            time.sleep(LOOK_AGAIN_S)
        if _holder(run_dir).get("launch") == launch:
            return True
    return False


def _holder(run_dir: Path) -> dict[str, Any]:
    try:
        return json.loads((run_dir / RUN_LOCK).read_text())
    except ValueError:  # the holder has the lock but hasn't written its name yet
        return {}


def _refusal(run_dir: Path, remedy: str = ANOTHER_DIRECTORY) -> UserError:
    holder = _holder(run_dir)
    who = "process {pid} on {host}, started {started}".format(**holder) if holder else "a process that has just started"
    return UserError(f"Another run is writing into {run_dir}: {who}. {remedy}")


def hold_rank_lock(run_dir: Path) -> None:
    """Mark this process as a live rank of the run until it ends. Call `die_with_parent` before it."""
    _lock(run_dir / RANKS_LOCK, fcntl.LOCK_SH)


def wait_for_ranks(run_dir: Path, deadline_s: float = 60.0) -> None:
    """Return when no rank of an earlier attempt or supervisor lives; raises UserError after `deadline_s` seconds."""
    path = run_dir / RANKS_LOCK
    start = time.monotonic()
    told = False
    while (fd := _lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB)) is None:
        waited = time.monotonic() - start
        if waited > deadline_s:
            raise UserError(
                f"Ranks of an earlier start of the run in {run_dir} are still alive after {deadline_s:g} s. "
                f"`fuser {path}` on their machine shows them; end them and run the same command again."
            )
        if waited > 1 and not told:
            told = True
            log.info("Waiting for the ranks of an earlier start in %s to end.", run_dir)
        time.sleep(0.05)
    os.close(fd)
