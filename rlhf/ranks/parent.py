"""A process that never outlives the one that started it."""

import ctypes
import os
import signal
import sys

SUPERVISOR_PID = "RLHF_SUPERVISOR_PID"
"""Names the supervisor of a rank; without it (torchrun, a debugger) the rank tells its errors itself."""
PARENT_PID = "RLHF_PARENT_PID"
"""Names the process that started this one: of a rank the supervisor or its launcher, of a rollout server the rank."""
_PR_SET_PDEATHSIG = 1


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
