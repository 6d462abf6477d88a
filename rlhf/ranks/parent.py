"""A process that never outlives the one that started it."""

import ctypes
import os
import signal
import sys

SUPERVISOR_PID = "RLHF_SUPERVISOR_PID"
_PR_SET_PDEATHSIG = 1


def die_with_parent(variable: str = SUPERVISOR_PID) -> None:
    """Have the kernel kill this process when the one that `variable` names ends, however it ends (Linux only).

    For a rank that is its supervisor, for a rollout server the rank that started it. Call it first thing, before slow
    imports. Does nothing without a supervisor (torchrun, a debugger). Start such a process from a thread that lives as
    long as yours: the kernel watches the thread that started it.
    """
    supervisor = os.environ.get(variable)
    if supervisor is None or sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != int(supervisor):  # it died before the line above
        os.kill(os.getpid(), signal.SIGKILL)
