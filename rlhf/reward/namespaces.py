"""Puts a reward process into Linux namespaces, with its own process ids, a folder in memory, an overlay on /dev/shm.

When the first process of the namespace ends, the kernel kills all other processes of the namespace, whatever sessions
they created. The files in memory vanish with these processes, however the processes ended.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from rlhf.reward import kernel
from rlhf.storage.files import make_new_dir

SHARED_MEMORY = "/dev/shm"
_UPPER = "upper"
FIXED_PATH = "/var/tmp"
"""Programs of `env.command` find their folders at this path, in place of the machine's own files."""
_FOLDER_BYTES, _FOLDER_FILES = 1 << 30, 100_000


class NoLoopback(Exception):
    """The machine does not allow a network namespace."""


def enter(folder: str, writable: Sequence[str], missing: list[str], *, own_loopback: bool, fixed_path: bool) -> str:
    """Continue in new namespaces, in a grandchild; this process ends with the grandchild's exit status or signal.

    Mounts a file system over the empty `folder` and returns a writable folder in it. Writes to the folders `writable`
    stay visible outside. Appends a line to `missing` for each protection that the machine does not allow.

    Args:
        own_loopback: also enter a network namespace, whose only device is a loopback device.
        fixed_path: show the folder at FIXED_PATH.

    Raises:
        NoLoopback: the machine does not allow the network namespace.
    """
    user, group = os.geteuid(), os.getegid()
    flags = kernel.CLONE_NEWPID | kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC
    flags |= kernel.CLONE_NEWNET if own_loopback else 0
    try:
        kernel.unshare(flags if user == 0 else flags | kernel.CLONE_NEWUSER)
    except OSError as error:
        if own_loopback:
            raise NoLoopback(str(error)) from error
        missing.append(
            f"namespaces ({error}): a child in another session can outlive a timeout, and reward processes can write "
            f"to {SHARED_MEMORY}"
        )
        return folder
    try:
        if user != 0:
            kernel.write_proc("/proc/self/setgroups", "deny")
            kernel.write_proc("/proc/self/uid_map", f"{user} {user} 1")
            kernel.write_proc("/proc/self/gid_map", f"{group} {group} 1")
        if own_loopback:
            kernel.raise_loopback()
    except OSError as error:  # Ubuntu 24.04 allows a user namespace, but no rights in it
        if own_loopback:
            raise NoLoopback(str(error)) from error
        raise
    own = _mount(folder, writable, missing)
    if fixed_path:
        own = _at_fixed_path(own, writable, missing)
    _become_a_grandchild()
    return own


def _mount(folder: str, writable: Sequence[str], missing: list[str]) -> str:
    options = f"size={_FOLDER_BYTES},nr_inodes={_FOLDER_FILES},mode=0755"
    try:
        kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
        kernel.mount("tmpfs", folder, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
    except OSError as error:
        missing.append(f"private mounts ({error}): the size of a reward process' folder is not limited")
        return folder
    home, upper, work = (Path(folder, name) for name in ("home", _UPPER, "work"))
    for path in (home, upper, work):
        make_new_dir(path)
    upper.chmod(0o1777)
    try:
        _cover_shared_memory(f"lowerdir={SHARED_MEMORY},upperdir={upper},workdir={work}", [folder, *writable])
    except OSError as error:
        missing.append(
            f"an overlay over {SHARED_MEMORY} ({error}): reward processes can write to your other processes' shared "
            "memory"
        )
    return str(home)


def written_shared_memory(folder: str) -> Path:
    """Return where an overlay stores what was written to /dev/shm. `folder`: the folder of temporary files.

    If there is no overlay, the path does not exist.
    """
    return Path(os.path.realpath(folder)).parent / _UPPER


def _at_fixed_path(folder: str, writable: Sequence[str], missing: list[str]) -> str:
    """Show `folder` at FIXED_PATH and return this path.

    Return `folder` if the machine does not allow this, or if the mount would hide Python, the user's files or
    `writable`.

    An agent may send paths to the policy, and a resumed run has the same bits only if the paths are the same.
    """
    needed = map(os.path.realpath, (sys.prefix, sys.base_prefix, __file__, os.getcwd(), *writable))  # noqa: PTH109
    try:
        if any(Path(path).is_relative_to(FIXED_PATH) for path in needed):
            raise OSError("needed files are there")
        kernel.mount(folder, FIXED_PATH, "", kernel.MS_BIND)
    except OSError as error:
        missing.append(f"{FIXED_PATH} ({error}): programs that send paths to the policy do not resume exactly")
        return folder
    return FIXED_PATH


def _cover_shared_memory(layers: str, kept: Sequence[str]) -> None:
    """Send writes to /dev/shm to an overlay; Python's multiprocessing creates its semaphores there."""
    under = [path for path in map(os.path.realpath, kept) if Path(SHARED_MEMORY) in Path(path).parents]
    opened = [(path, os.open(path, os.O_RDONLY | os.O_DIRECTORY)) for path in under]
    try:
        kernel.mount("overlay", SHARED_MEMORY, "overlay", kernel.MS_NOSUID | kernel.MS_NODEV, layers)
        for path, fd in opened:
            kernel.mount(f"/proc/self/fd/{fd}", path, "", kernel.MS_BIND | kernel.MS_REC)
    finally:
        for _, fd in opened:
            os.close(fd)


def _become_a_grandchild() -> None:
    if child := os.fork():
        _end_like(child)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    # This mount fails in a container that hides parts of /proc. /proc/self is this process with or without it.
    with contextlib.suppress(OSError):
        kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    # The first process of a namespace ignores signals that it does not handle, so the verifier runs in a second
    # process.
    if child := os.fork():
        _end_like(child)


def _end_like(child: int) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for fd in (0, 1, 2):  # the trainer sees a pipe's end only when no process has the pipe open
        os.close(fd)
    ended = 0
    while ended != child:
        ended, status = os.wait()
    code = os.waitstatus_to_exitcode(status)
    if code > 128 and os.getpid() != 1:
        with contextlib.suppress(OSError):
            os.kill(os.getpid(), code - 128)
    os._exit(code if code >= 0 else 128 - code)
