"""Starts the launcher from the supervisor, and follows the ranks that the launcher forks."""

import signal
import subprocess
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path

from rlhf.launch.interface import RankExit
from rlhf.launch.local.processes import RankProcesses, start_process
from rlhf.launch.local.rank_output import RankOutput
from rlhf.ranks.launch_messages import CountDevices, Devices, Fork, Forked, RankEnded
from rlhf.ranks.parent import STOPPED, exit_code_of, state_of

# An exiting interpreter closes its connections some milliseconds before its process ends.
_EXIT_WAIT_S = 2.0
# After this many looks at a dead rank, 0.1 s each, do not wait any longer for the launcher to report the rank's end.
_LATE_LOOKS = 20

Message = Forked | Devices | RankEnded


def start_launcher(
    fd: int, modules: Sequence[str], variables: Mapping[str, str], output: RankOutput | None
) -> "subprocess.Popen[bytes]":
    return start_process(["-m", "rlhf.ranks.launcher", str(fd), *modules], [fd], variables, output)


class LauncherProcess:
    """A running launcher. The constructor starts the launcher, which imports `modules`. Call `close` at the end."""

    def __init__(self, modules: Sequence[str], variables: Mapping[str, str], output: RankOutput | None = None) -> None:
        self._connection, theirs = Pipe()
        with theirs:
            self._popen = start_launcher(theirs.fileno(), modules, variables, output)
        self.pid = self._popen.pid
        self.exit: int | None = None
        """Exit code, negative for a signal; None while the launcher runs. A launcher's death kills its ranks."""

    @property
    def is_stopped(self) -> bool:
        return self.exit is None and state_of(self.pid) in STOPPED

    def send(self, request: Fork | CountDevices) -> None:
        """Send a request. `receive` returns the answer, unless the launcher ends."""
        try:
            self._connection.send(request)
        except OSError:
            self._lost()

    def receive(self, wait_s: float) -> Message | None:
        """Return the next message; None if no message arrives within `wait_s` seconds or the launcher has ended."""
        if self.exit is not None:
            return None
        try:
            return self._connection.recv() if self._connection.poll(wait_s) else None
        except (EOFError, OSError):
            self._lost()
            return None

    def _lost(self) -> None:
        """Wait for the exit code of a launcher that closed its connection, then close."""
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(_EXIT_WAIT_S)
        self.close()

    def close(self) -> None:
        if self.exit is None:
            self._popen.kill()
            self.exit = self._popen.wait()
            self._connection.close()


class ForkedRanks(RankProcesses):
    """`Ranks` that a launcher forked. If the launcher dies, the kernel kills the ranks.

    If the launcher does not report the end of a rank, for example because a debugger stopped the launcher, `ended`
    finds the end in `/proc`.
    """

    def __init__(self, launcher: LauncherProcess, nproc: int, pids: Mapping[int, int], run_dir: Path) -> None:
        super().__init__(pids, run_dir)
        self._launcher = launcher
        self._running = set(range(nproc))
        self._looks_at_dead: Counter[int] = Counter()

    def ended(self, wait_s: float) -> dict[int, RankExit]:
        exits: dict[int, RankExit] = {}
        while (message := self._launcher.receive(0.0 if exits else wait_s)) is not None:
            assert isinstance(message, RankEnded)
            if message.rank in self._running:
                exits[message.rank] = RankExit(message.code)
        exits |= self._unreported(self._running - exits.keys())
        if self._launcher.exit is not None:
            died_with = f"the launcher: {RankExit(self._launcher.exit)}"
            lost = self._running - exits.keys()
            exits |= {rank: RankExit(-signal.SIGKILL, died_with) for rank in lost}
            self.kill(lost)  # the ranks are dead; this kills the processes that they started
        self._running -= exits.keys()
        return exits

    def _unreported(self, ranks: Collection[int]) -> dict[int, RankExit]:
        """Return the exits of the ranks that have been dead for `_LATE_LOOKS` calls without the launcher's report."""
        codes = {rank: code for rank in ranks if (code := exit_code_of(self._pids.get(rank, -1))) is not None}
        self._looks_at_dead.update(codes.keys())
        return {rank: RankExit(code) for rank, code in codes.items() if self._looks_at_dead[rank] >= _LATE_LOOKS}
