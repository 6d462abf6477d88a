"""A process that never outlives the one that started it."""

import ctypes
import os
import signal
import sys
import uuid
from pathlib import Path

SUPERVISOR_PID = "RLHF_SUPERVISOR_PID"
"""Names the supervisor of a rank; without it (torchrun, a debugger) the rank tells its errors itself."""
PARENT_PID = "RLHF_PARENT_PID"
"""Names the process that started this one: of a rank the supervisor or its launcher, of a rollout server the rank."""
_PR_SET_PDEATHSIG = 1
_OF_TORCHRUN = "TORCHELASTIC_RUN_ID"
_BOOT, _PROCESSES = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")


def die_with_parent(variable: str = PARENT_PID) -> None:
    """Have the kernel kill this process when the one that `variable` names ends, however it ends (Linux only).

    Call it first thing, before slow imports. Does nothing where the variable is not set (torchrun, a debugger). Start
    such a process from a thread that lives as long as yours: the kernel watches the thread that started it.
    """
    parent = os.environ.get(variable)
    if parent is None or sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != int(parent):  # it died before the line above
        os.kill(os.getpid(), signal.SIGKILL)


def torchrun_agent() -> str | None:
    """Name of the torchrun process that has started this rank, the same in all its attempts and no other's ever; None
    without torchrun.

    The run id is no such name: users repeat it, and without an elastic rendezvous it is "none". Nor is the count of
    restarts, which stays 0 when machines come and go.
    """
    if _OF_TORCHRUN not in os.environ or sys.platform != "linux":
        return None
    pid = os.getppid()
    # Between the two there may be a script of the user's, which has inherited the variable.
    while pid > 1 and f"{_OF_TORCHRUN}=".encode() in Path(f"/proc/{pid}/environ").read_bytes():
        pid = int(_stat(pid)[1])
    return f"{_BOOT.read_text().strip()}-{pid}-{_stat(pid)[19]}"


def machine() -> str:
    """Text that all processes which see each other's process ids share: no other running machine has it, nor another
    container on this one."""
    boot = _BOOT.read_text().strip() if _BOOT.exists() else str(uuid.getnode())
    return f"{boot} {_PROCESSES.readlink() if _PROCESSES.exists() else ''}"


def birth_of(pid: int) -> str | None:
    """The time of a process' start, which tells it from a later one with its id; None if it has ended. Linux only."""
    try:
        fields = _stat(pid)
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else fields[19]


def _stat(pid: int) -> list[str]:
    """The fields of a process' `/proc` entry after its name: 0 is its state, 1 its parent, 19 the time of its start."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
