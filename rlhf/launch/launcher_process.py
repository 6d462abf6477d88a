"""Supervisor's end of the launcher, and of the ranks that are forked from it."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe

from rlhf.launch.rank_output import RankOutput
from rlhf.ranks.launch_messages import CountDevices, Devices, Fork, Forked, RankEnded
from rlhf.ranks.parent import PARENT_PID

# An interpreter closes its connections some milliseconds before it ends.
_LAST_MOMENTS_S = 2.0

Message = Forked | Devices | RankEnded


def start_launcher(
    fd: int, modules: Sequence[str], variables: Mapping[str, str], output: RankOutput | None
) -> "subprocess.Popen[bytes]":
    """`rlhf.ranks.launcher.main(fd, modules)` in a process of its own, with `variables` in its environment; what it and
    its ranks print goes to `output`, or where this process's goes."""
    # A session of its own, like a rank: Ctrl-C is the supervisor's to handle.
    return subprocess.Popen(
        [sys.executable, "-m", "rlhf.ranks.launcher", str(fd), *modules],
        env=os.environ | variables | (output.variables if output else {}),
        pass_fds=(fd, output.progress_fd) if output else (fd,),
        stdout=output.stdout if output else None,
        stderr=output.stderr if output else None,
        start_new_session=True,
    )


class LauncherProcess:
    """A running launcher, which imports `modules` from the moment on that this object is made. Close it in the end."""

    def __init__(self, modules: Sequence[str], variables: Mapping[str, str], output: RankOutput | None = None) -> None:
        self._connection, theirs = Pipe()
        with theirs:
            own = {**variables, PARENT_PID: str(os.getpid())}
            self._popen = start_launcher(theirs.fileno(), modules, own, output)
        self.pid = self._popen.pid
        self.exit: int | None = None
        """Its exit code, negative for a signal, once it is known to have ended. The kernel ends its ranks with it."""

    def ask(self, request: Fork | CountDevices) -> None:
        """Send a request; the answer comes through `receive`, or never if the launcher ends."""
        try:
            self._connection.send(request)
        except OSError:
            self._lost()

    def receive(self, wait_s: float) -> Message | None:
        """The next message; None when there is none within `wait_s` seconds, or the launcher has ended."""
        if self.exit is not None:
            return None
        try:
            return self._connection.recv() if self._connection.poll(wait_s) else None
        except (EOFError, OSError):
            self._lost()
            return None

    def _lost(self) -> None:
        """The connection has ended; the process does so next, with an exit code that says more than a kill."""
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(_LAST_MOMENTS_S)
        self.close()

    def close(self) -> None:
        """End it, and with it all its ranks."""
        if self.exit is None:
            self._popen.kill()
            self.exit = self._popen.wait()
            self._connection.close()


class ForkedRanks:
    """Ranks that a launcher has forked."""

    def __init__(self, launcher: LauncherProcess, nproc: int, pids: Mapping[int, int]) -> None:
        self._launcher = launcher
        self._running = set(range(nproc))
        self.pids = dict(pids)

    @property
    def launcher_exit(self) -> int | None:
        """The exit code of the launcher, if it has ended, and its ranks with it."""
        return self._launcher.exit

    def ended(self, wait_s: float) -> dict[int, int]:
        """Exit codes of the ranks that have ended since the last call; waits up to `wait_s` seconds for the first of
        them."""
        codes: dict[int, int] = {}
        while (message := self._launcher.receive(0.0 if codes else wait_s)) is not None:
            assert isinstance(message, RankEnded)
            codes[message.rank] = message.code
        if self._launcher.exit is not None:
            for rank in self._running - codes.keys():
                codes[rank] = -signal.SIGKILL
                self.kill(rank)  # for its children
        self._running -= codes.keys()
        return codes

    def kill(self, rank: int) -> None:
        """SIGKILL to a rank and its children."""
        if rank in self.pids:
            kill_group(self.pids[rank])


def kill_group(leader: int) -> None:
    """SIGKILL to a rank, the leader of a session, and to its children; so early in its life it is no leader yet."""
    for kill in (os.kill, os.killpg):
        with suppress(ProcessLookupError):
            kill(leader, signal.SIGKILL)
