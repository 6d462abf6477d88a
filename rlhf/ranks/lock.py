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
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from rlhf.errors import UserError

RUN_LOCK = "run.lock"
RANKS_LOCK = "ranks.lock"

log = logging.getLogger(__name__)


def _lock(path: Path, operation: int, setting: str = "trainer.default_local_dir") -> int | None:
    """The locked file descriptor (not inherited by children that exec), or None when another process holds the lock."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
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
def run_lock(run_dir: Path) -> Iterator[None]:
    """Hold the run directory alone; raises UserError at once when another run holds it."""
    path = run_dir / RUN_LOCK
    fd = _lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if fd is None:
        raise UserError(
            f"Another run is writing into {run_dir}: {_holder(path)}. Wait for it or stop it, or give this run a "
            "directory of its own with trainer.experiment_name=NAME."
        )
    try:
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "started": datetime.now().isoformat(" ", "seconds")}
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps(holder).encode(), 0)
        yield
    finally:
        os.close(fd)


def _holder(path: Path) -> str:
    try:
        holder = json.loads(path.read_text())
    except ValueError:  # the holder has the lock but hasn't written its name yet
        return "a process that has just started"
    return f"process {holder['pid']} on {holder['host']}, started {holder['started']}"


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
