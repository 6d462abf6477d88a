"""Ties a process to its parent, so that it dies with it, and identifies processes and machines beyond process ids."""

import ctypes
import os
import signal
import sys
import uuid
from pathlib import Path

SUPERVISOR_PID = "RLHF_SUPERVISOR_PID"
"""Environment variable: process id of a rank's supervisor. Without it (torchrun, a debugger) a rank logs its errors
itself."""
PARENT_PID = "RLHF_PARENT_PID"
"""Environment variable: process id of the parent. A rank's parent is the supervisor or its launcher, a rollout server's
parent is the rank."""
_PR_SET_PDEATHSIG = 1
_OF_TORCHRUN = "TORCHELASTIC_RUN_ID"
_BOOT, _PROCESSES = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")


def die_with_parent(variable: str = PARENT_PID) -> None:
    """Have the kernel kill this process when its parent, whose process id is in `variable`, ends (Linux only).

    Call this before slow imports. It does nothing if the variable is not set (torchrun, a debugger). The kernel watches
    the thread that started the process, so the parent must start it from a thread that lives as long as the parent.
    """
    parent = os.environ.get(variable)
    if parent is None or sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != int(parent):  # the parent died before the call of prctl
        os.kill(os.getpid(), signal.SIGKILL)


def torchrun_agent() -> str | None:
    """Return a unique name of the torchrun process that started this rank, the same in all its attempts.

    None without torchrun, and outside Linux. torchrun's run id is not unique: users repeat it, and without an elastic
    rendezvous it is "none". The restart count does not identify a launch either: it stays 0 when machines come and go.
    """
    if _OF_TORCHRUN not in os.environ or sys.platform != "linux":
        return None
    pid = os.getppid()
    # A script of the user's may lie between torchrun and this rank. It has inherited the variable.
    while pid > 1 and f"{_OF_TORCHRUN}=".encode() in Path(f"/proc/{pid}/environ").read_bytes():
        pid = int(_stat(pid)[1])
    return f"{_BOOT.read_text().strip()}-{pid}-{_stat(pid)[19]}"


def machine() -> str:
    """Return a text that identifies this machine and its process-id namespace (its container).

    Processes with the same text see each other's process ids.
    """
    boot = _BOOT.read_text().strip() if _BOOT.exists() else str(uuid.getnode())
    return f"{boot} {_PROCESSES.readlink() if _PROCESSES.exists() else ''}"


def birth_of(pid: int) -> str | None:
    """Return the start time of a process, or None if it has ended. Linux only.

    The start time distinguishes the process from a later one with the same process id.
    """
    try:
        fields = _stat(pid)
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else fields[19]


def _stat(pid: int) -> list[str]:
    """Return the fields of `/proc/PID/stat` after the name: 0 is the state, 1 the parent, 19 the start time."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
