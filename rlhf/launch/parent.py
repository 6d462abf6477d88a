"""A process that never outlives the one that started it."""

import ctypes
import os
import signal
import sys

SUPERVISOR_PID = "RLHF_SUPERVISOR_PID"
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this rank when its supervisor ends, however it ends (Linux only).

    Call it first thing in a rank, before slow imports. Does nothing without a supervisor (torchrun, a debugger). The
    supervisor starts ranks from its main thread, which matters because the kernel watches the thread that started the
    process.
    """
    supervisor = os.environ.get(SUPERVISOR_PID)
    if supervisor is None or sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != int(supervisor):  # it died before the line above
        os.kill(os.getpid(), signal.SIGKILL)
