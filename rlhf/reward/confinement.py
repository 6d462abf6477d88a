"""Confines a reward process: resource limits, its own folder, no network, no access to the trainer.

The process confines itself before it loads a verifier, as far as its kernel allows. The file
`docs/design/reward-isolation.md` lists what the confinement blocks and what it leaves open.
"""

import contextlib
import fcntl
import math
import os
import resource
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf.reward import kernel, namespaces
from rlhf.storage.files import remove_dir

MAX_PROCESSES = 1024
"""Limit on processes and threads of a reward process with its own user. With a shared user the limit is four times as
high, plus the threads that the user already runs."""
AGENT_PROCESSES = 16
"""Factor of MAX_PROCESSES for agents, whose programs all run at the same time: each has about six threads."""
MAX_OPEN_FILES = 4096
MAX_FILE_BYTES = 1 << 30
_PREFIX = "rlhf-reward-"
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/ptmx")
_ACCELERATORS = ("nvidia*", "kfd", "dri/render*")
# systemd reserves these ids for users without a name. Every user namespace maps them.
_FIRST_UID, _UIDS = 61184, 4096
_FORBIDDEN_CALLS = (
    *("ptrace", "process_vm_readv", "process_vm_writev", "pidfd_getfd", "add_key", "request_key", "keyctl"),
    # With CAP_DAC_READ_SEARCH this call opens files outside all mounts, for example the host's files from a container.
    "open_by_handle_at",
)
_NETWORK_CALLS = ("socket", "io_uring_setup")


@dataclass(frozen=True)
class Confinement:
    """Rights of a reward process or of a host of environments. The fields come from `RewardConfig` or `EnvConfig`."""

    memory_gb: float | None
    """GiB that the process, and each process that it starts, may allocate; None: no limit."""
    network: bool
    writable: list[str]
    """Folders that the process may write, in addition to its own folder."""
    loopback: bool = False
    """Whether the process and its children may talk to each other over a loopback device of their own."""


@dataclass(frozen=True)
class Confined:
    """Result of `confine`, for the trainer."""

    folder: str
    """Path of the process' folder outside its namespaces; the trainer removes this folder. The folder has no files if a
    tmpfs was mounted over it."""
    missing: list[str]
    """Protections that this machine does not allow, each with the consequence."""


def confine(confinement: Confinement) -> Confined:
    """Confine this process for good, and set HOME and TMPDIR to its own folder.

    Call it while the process has one thread. With process namespaces the function returns in a grandchild; the calling
    process ends with the grandchild's exit status or signal.
    """
    missing: list[str] = []
    folder = own = _new_folder()
    if sys.platform == "linux":
        number = os.getpid()
        running = 0 if os.getuid() == 0 else _threads_of_this_user()
        _set_limits(confinement.memory_gb)
        alone = confinement.loopback and not confinement.network
        own = namespaces.enter(
            folder, confinement.writable, missing, own_loopback=alone, fixed_path=confinement.loopback
        )
        own_user = _drop_privileges(_FIRST_UID + number % _UIDS, own, bool(confinement.writable), missing)
        most = MAX_PROCESSES * (AGENT_PROCESSES if confinement.loopback else 1)
        _limit(resource.RLIMIT_NPROC, most if own_user else 4 * most + running)
        _restrict(confinement, own, missing)
    else:
        missing.append("Linux: reward processes have all rights of your user, without limits")
    os.environ.update(HOME=own, TMPDIR=own)
    tempfile.tempdir = None  # forget the cached folder
    return Confined(folder, missing)


class CpuTime:
    """Limits this process' CPU time per sample to `timeout_s` on all cores.

    Child processes inherit the limit. Only processes that outlive their sample reach the limit: the trainer kills the
    reward process after `timeout_s`.
    """

    def __init__(self, timeout_s: float):
        self._allowance = timeout_s * (os.cpu_count() or 1)
        self._limit = 0

    def renew(self, count: int = 1) -> None:
        """Raise the limit, if needed, to leave CPU time for `count` samples (at most twice that time, plus 1 s)."""
        used, allowance = time.process_time(), self._allowance * count
        if self._limit - used < allowance:
            self._limit = math.ceil(used + 2 * allowance)
            hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
            soft = self._limit if hard == resource.RLIM_INFINITY else min(self._limit, hard)
            resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def _new_folder() -> str:
    """Create an empty folder, locked as long as the process lives; remove the folders of dead processes."""
    for old in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # the folder's process lives, or another user owns the folder
            lock = _lock(old)
            remove_dir(old, ignore_errors=True)
            os.close(lock)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        with contextlib.suppress(OSError):  # another process just removed the folder, because it was not locked yet
            _lock(folder)  # the lock lasts until the process ends
            if folder.exists():
                return str(folder)


def _lock(folder: Path) -> int:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def _set_limits(memory_gb: float | None) -> None:
    # Some memory mappings count against no limit. When memory runs out, the kernel kills this process first.
    kernel.write_proc("/proc/self/oom_score_adj", "1000")
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_NOFILE, MAX_OPEN_FILES)
    _limit(resource.RLIMIT_FSIZE, MAX_FILE_BYTES)
    if memory_gb is not None:
        # Limit the data, not the address space: CUDA and other libraries reserve far more than they use.
        _limit(resource.RLIMIT_DATA, int(memory_gb * (1 << 30)))


def _limit(what: int, value: int) -> None:
    hard = resource.getrlimit(what)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(what, (value, value))


def _threads_of_this_user() -> int:
    count, user = 0, os.getuid()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended
            if process.stat().st_uid == user:
                count += len(list((process / "task").iterdir()))
    return count


def _drop_privileges(uid: int, own: str, writes: bool, missing: list[str]) -> bool:
    """Drop capabilities. A process of root keeps only the right to read any file, or with `writes` to write any file.

    Root becomes user `uid`, because a process of root has no limit on child processes and could harm the trainer.
    Return whether the user changed.
    """
    if os.geteuid() != 0:
        kernel.set_capabilities(0)
        return False
    kept = kernel.permitted_capabilities() & 1 << kernel.CAP_DAC_READ_SEARCH
    if writes or not kept:  # DAC_OVERRIDE also allows reading; Landlock limits the writing
        kept |= kernel.permitted_capabilities() & 1 << kernel.CAP_DAC_OVERRIDE
    try:
        if not kept:
            raise OSError("without the capability DAC_OVERRIDE")
        os.chown(own, uid, uid)
        kernel.prctl(kernel.PR_SET_KEEPCAPS, 1)
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    except OSError as error:
        missing.append(f"a separate user instead of root ({error}): the number of processes is not limited")
        kernel.set_capabilities(kept)
        return False
    kernel.set_capabilities(kept)
    # A change of the user resets two properties: the process can read its own /proc, and it dies with its parent.
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    return True


def restrict_to(folders: Sequence[str], *, abstract_sockets: bool) -> int:
    """Let this process, for good, write only to `folders` and devices, as far as Landlock can.

    The process then also cannot trace or signal processes with fewer restrictions. Return Landlock's version.
    """
    if version := kernel.landlock_version():
        devices = [*_DEVICES, *(str(path) for pattern in _ACCELERATORS for path in Path("/dev").glob(pattern))]
        paths = [path for path in (*sorted(set(folders)), *devices) if Path(path).exists()]
        kernel.restrict_writing(version, paths, abstract_sockets=abstract_sockets)
    return version


def _restrict(confinement: Confinement, own: str, missing: list[str]) -> None:
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    # Python's multiprocessing creates its semaphores in shared memory.
    folders = [own, namespaces.SHARED_MEMORY, *confinement.writable]
    version = restrict_to(folders, abstract_sockets=confinement.network)
    if version < 6:
        missing.append(_without_landlock(version))
    # With a loopback device, forbid sockets of all other families: a socket in the file system, such as Docker's, is
    # reachable from every network namespace.
    internet = {"socket": (socket.AF_INET, socket.AF_INET6)}
    unless_first = internet if confinement.loopback and not confinement.network else {}
    network = () if confinement.network else tuple(call for call in _NETWORK_CALLS if call not in unless_first)
    try:
        kernel.forbid_calls((*_FORBIDDEN_CALLS, *network), unless_first=unless_first)
    except OSError as error:
        missing.append(f"seccomp ({error}): reward processes can use the network")


def _without_landlock(version: int) -> str:
    if version == 0:
        return (
            "Landlock (Linux 5.13): reward processes can write wherever your user can, and may read the trainer's "
            "environment variables"
        )
    truncate = "truncate other files and " if version < 3 else ""
    return f"Landlock 6 (Linux 6.12; here {version}): reward processes can {truncate}signal your other processes"
