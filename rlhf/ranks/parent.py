"""Makes a process die with its parent, and identifies processes and machines uniquely, because ids are reused."""

import ctypes
import os
import signal
import sys
import uuid
from pathlib import Path

SUPERVISOR_PID = "RLHF_SUPERVISOR_PID"
"""Variable with the process id of a rank's supervisor. Without it (torchrun, a debugger) a rank logs its own errors."""
PARENT_PID = "RLHF_PARENT_PID"
"""Variable with the process id of the parent: a rank's supervisor or launcher, or a rollout server's keeper."""
KEEPER = "RLHF_SERVER_KEEPER"
"""Variable with the socket path of the process that keeps a run's rollout servers. The supervisor sets it."""
LAUNCH = "RLHF_LAUNCH"
"""Variable with the name of a scheduler's job. The name is the same in all attempts, also after a requeue."""
STOPPED = ("T", "t")
"""States (`state_of`) of a process that a signal or a debugger has stopped."""
_PR_SET_PDEATHSIG = 1
_OF_TORCHRUN = "TORCHELASTIC_RUN_ID"
_BOOT, _PROCESSES = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")


def die_with_parent(variable: str = PARENT_PID) -> None:
    """Ask the kernel to kill this process when its parent, whose process id is in `variable`, ends. Linux only.

    Call this before slow imports. Without the variable (torchrun, a debugger) nothing happens. The kernel watches the
    thread that started the process, so that thread must live as long as the parent.
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
    """Return a unique name of the torchrun process that started this rank; None without torchrun or Linux.

    torchrun's run id is not unique: users repeat it, and without an elastic rendezvous it is "none". The restart count
    does not identify a launch either: it stays 0 when machines come and go.
    """
    if _OF_TORCHRUN not in os.environ or sys.platform != "linux":
        return None
    pid = os.getppid()
    # The parent may be a user's script, which has inherited the variable. Find the nearest ancestor without it.
    while pid > 1 and f"{_OF_TORCHRUN}=".encode() in Path(f"/proc/{pid}/environ").read_bytes():
        pid = int(_stat(pid)[1])
    return f"{_BOOT.read_text().strip()}-{pid}-{_stat(pid)[19]}"


def machine() -> str:
    """Return the identity of this machine and its process-id namespace, within which process ids are valid."""
    boot = _BOOT.read_text().strip() if _BOOT.exists() else str(uuid.getnode())
    return f"{boot} {_PROCESSES.readlink() if _PROCESSES.exists() else ''}"


def start_time_of(pid: int) -> str | None:
    """Return the start time of a process, which differs if its id is reused; None if it has ended. Linux only."""
    fields = _stat(pid)
    return None if fields[0] in "ZX" else fields[19]


def state_of(pid: int) -> str:
    """Return the letter of a process's state, such as T for stopped and Z for ended; X if it is gone. Linux only."""
    return _stat(pid)[0]


def exit_code_of(pid: int) -> int | None:
    """Return the exit code (negative for a signal) of a zombie of this user; None if the process runs or is gone.

    A zombie is a process that has ended and that its parent has not waited for. Linux only.
    """
    fields = _stat(pid)
    return os.waitstatus_to_exitcode(int(fields[49])) if fields[0] == "Z" else None


def _stat(pid: int) -> list[str]:
    """Return the fields of `/proc/PID/stat` after the name; only the state X for a process that is gone.

    Field 0 is the state, 1 the parent, 19 the start time, 49 the exit status of a process that has ended.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ["X"]
