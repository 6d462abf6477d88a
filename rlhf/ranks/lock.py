"""Locks the run directory, so that only one run writes there, and ranks start only after earlier ranks have ended.

The locks are `flock`s, which the kernel releases when a process ends: there are no stale locks.
"""

import errno
import fcntl
import json
import logging
import os
import socket
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from rlhf.errors import UserError
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.parent import STOPPED, machine, start_time_of, state_of

RUN_LOCK = "run.lock"
RANKS_LOCK = "ranks.lock"
LOOKS, LOOK_AGAIN_S = 4, 0.25
ANOTHER_DIRECTORY = "Wait for it or stop it, or give this run a directory of its own with trainer.experiment_name=NAME."

log = logging.getLogger(__name__)


def _lock(path: Path, operation: int, setting: str = "trainer.default_local_dir", fd: int | None = None) -> int | None:
    """Return a locked file descriptor, which is closed on exec; None if another process has the lock.

    A given `fd` has the other kind of lock (exclusive or shared), which this call converts. A failed conversion loses
    that lock and closes `fd`. Raise OSError for a path that is not a regular file, such as a pipe.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644) if fd is None else fd
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", str(path))
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
    """Lock the file `path` unless another process has the lock. Yield whether the file is locked.

    Raise UserError, naming the `setting` that decides `path`, if the file system has no locks.
    """
    fd = _lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB, setting)
    try:
        yield fd is not None
    finally:
        if fd is not None:
            os.close(fd)


@contextmanager
def shared_lock(path: Path, setting: str) -> Iterator[None]:
    """Share the lock of the file `path` with other processes of this run; wait while a process has an exclusive lock.

    Raise UserError, naming the `setting` that decides `path`, if the file system has no locks.
    """
    fd = _lock(path, fcntl.LOCK_SH, setting)
    assert fd is not None
    try:
        yield
    finally:
        os.close(fd)


@contextmanager
def run_lock(run_dir: Path, remedy: str = ANOTHER_DIRECTORY) -> Iterator[None]:
    """Lock the run directory.

    Raise UserError if another run has the lock (the message ends with `remedy`), or if the file system has no locks.
    """
    # Promise 12.
    fd = _lock_run(run_dir)
    for _ in range(LOOKS):
        if fd is not None:
            break
        # If the last holder was just starting a child process, the child has inherited the lock until it calls exec.
        time.sleep(LOOK_AGAIN_S)
        fd = _lock_run(run_dir)
    if fd is None:
        raise _in_use(run_dir, remedy)
    try:
        yield
    finally:
        os.close(fd)


@contextmanager
def run_lock_together(run_dir: Path, coordinator: Coordinator) -> Iterator[None]:
    """Lock the run directory for all ranks of one launch, on each disk if nodes have disks of their own. Collective.

    The first rank that locks a directory writes the launch into the lock file. The other ranks then share the lock. The
    lock is free when the last rank has left the `with` block or died.

    Raises:
        UserError: on every rank, if another run has a lock, or a file system has no locks. No file but the lock file
            has been written by then.
    """
    if coordinator.world_size == 1:
        with run_lock(run_dir):
            yield
        return
    launch = coordinator.broadcast(uuid.uuid4().hex)
    fd: int | None = None

    def acquire() -> None:
        nonlocal fd
        fd = _lock_run(run_dir, launch)

    def check_holder() -> None:
        if fd is None and not _is_held_by(launch, run_dir):
            raise _in_use(run_dir)

    def share() -> None:
        nonlocal fd
        fd = _lock(run_dir / RUN_LOCK, fcntl.LOCK_SH | fcntl.LOCK_NB, fd=fd)
        if fd is None:
            raise _in_use(run_dir)

    try:
        coordinator.everywhere(acquire)
        coordinator.everywhere(check_holder)
        acquired = fd is not None
        coordinator.everywhere(lambda: share() if acquired else None)
        coordinator.everywhere(lambda: None if acquired else share())
        yield
    finally:
        if fd is not None:
            os.close(fd)


def _lock_run(run_dir: Path, launch: str = "") -> int | None:
    """Acquire the run lock, write this process into the lock file, and return the lock's descriptor.

    Return None if another process has the lock.
    """
    fd = _lock(run_dir / RUN_LOCK, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if fd is None:
        return None
    holder = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started": datetime.now().isoformat(" ", "seconds"),
        "launch": launch,
        "machine": machine(),
        "born": start_time_of(os.getpid()),
    }
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps(holder).encode(), 0)
        os.fsync(fd)  # so that other nodes see the content
    except OSError:
        os.close(fd)
        raise
    return fd


def _is_held_by(launch: str, run_dir: Path) -> bool:
    """Return whether a rank of `launch` has the lock. Look several times: network file systems show writes late."""
    for look in range(LOOKS):
        if look:
            time.sleep(LOOK_AGAIN_S)
        if _holder(run_dir).get("launch") == launch:
            return True
    return False


def holder_is_alive(run_dir: Path) -> bool | None:
    """Return whether the process that last locked the run directory lives; None if it ran on another machine.

    Takes no lock, because a reader's lock could keep a run from starting.
    """
    try:
        holder = _holder(run_dir)
    except FileNotFoundError:
        return False
    if not holder:
        return False
    if holder.get("machine") != machine():
        return None
    return holder.get("born") is not None and start_time_of(int(holder["pid"])) == holder["born"]


def holder_is_paused(run_dir: Path) -> bool:
    """Return whether a signal or a debugger has stopped the process that holds the lock on this machine."""
    return state_of(int(_holder(run_dir)["pid"])) in STOPPED


def _holder(run_dir: Path) -> dict[str, Any]:
    path = run_dir / RUN_LOCK
    if path.exists() and not path.is_file():  # reading a pipe would never end
        return {}
    try:
        return json.loads(path.read_text())
    except ValueError:  # the process that has the lock has not yet written the file
        return {}


def _in_use(run_dir: Path, remedy: str = ANOTHER_DIRECTORY) -> UserError:
    holder = _holder(run_dir)
    who = "process {pid} on {host}, started {started}".format(**holder) if holder else "a process that has just started"
    return UserError(f"Another run is writing into {run_dir}: {who}. {remedy}")


def lock_as_rank(run_dir: Path) -> None:
    """Mark this process as a live rank of the run until the process ends. Call `die_with_parent` first."""
    _lock(run_dir / RANKS_LOCK, fcntl.LOCK_SH)


def wait_for_ranks(run_dir: Path, deadline_s: float = 60.0) -> None:
    """Wait until all ranks of earlier starts have ended. Raise UserError after `deadline_s` seconds."""
    path = run_dir / RANKS_LOCK
    start = time.monotonic()
    logged = False
    while (fd := _lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB)) is None:
        waited = time.monotonic() - start
        if waited > deadline_s:
            raise UserError(
                f"Ranks of an earlier start of the run in {run_dir} are still alive after {deadline_s:g} s. "
                f"`fuser {path}` on their machine shows them; end them and run the same command again."
            )
        if waited > 1 and not logged:
            logged = True
            log.info("Waiting for the ranks of an earlier start in %s to end.", run_dir)
        time.sleep(0.05)
    os.close(fd)
