"""Starts ranks as processes, signals them, and collects the stacks that a process writes even if it hangs."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from rlhf.launch.interface import RankExit, Stacks
from rlhf.launch.local.rank_output import RankOutput
from rlhf.ranks.parent import PARENT_PID, STOPPED, state_of
from rlhf.ranks.status import STACKS_SIGNAL, RankStatus, read_statuses, rename_stacks, stacks_file
from rlhf.ranks.world import listening_socket, rank_variables

# Seconds to wait for a dump, which takes milliseconds unless the process is stopped, stuck in the kernel or starting.
DUMP_TIMEOUT_S = 3.0
_SETTLED_S = 0.2


def start_process(
    command: Sequence[str], fds: Sequence[int], variables: Mapping[str, str], output: RankOutput | None
) -> "subprocess.Popen[bytes]":
    """Start `python *command`, which inherits `fds`, with `variables` added to the environment.

    `output` receives what the process and its children print. If `output` is None, they print to this process's stdout
    and stderr.
    """
    # Give the process a session of its own, so that only the supervisor receives the terminal's Ctrl-C.
    return subprocess.Popen(
        [sys.executable, *command],
        env=os.environ | variables | (output.variables if output else {}) | {PARENT_PID: str(os.getpid())},
        pass_fds=[*fds, output.progress_fd] if output else fds,
        stdout=output.stdout if output else None,
        stderr=output.stderr if output else None,
        start_new_session=True,
    )


class RankProcesses:
    """The methods of `Ranks` that need only the process ids (`pids`, by rank) and the status files in `run_dir`."""

    def __init__(self, pids: Mapping[int, int], run_dir: Path) -> None:
        self._pids, self._run_dir = dict(pids), run_dir

    def statuses(self) -> dict[int, RankStatus]:
        return read_statuses(self._run_dir, self._pids)

    def request_stop(self, ranks: Collection[int]) -> None:
        self._signal(ranks, signal.SIGUSR1)

    def stacks(self, ranks: Collection[int]) -> Stacks:
        """See `Ranks`. A process writes its stacks in C code, so a held GIL does not prevent the dump."""
        files = {rank: stacks_file(self._run_dir, rank) for rank in ranks}
        before = {rank: _size(path) for rank, path in files.items()}
        self._signal(ranks, STACKS_SIGNAL)
        _wait_until_written(files, before)
        texts = {rank: path.read_text(errors="replace") for rank, path in files.items() if _size(path) > before[rank]}
        silent = {rank: why_silent(self._pids[rank]) for rank in ranks}
        return Stacks(texts, silent, rename_stacks(self._run_dir))

    def kill(self, ranks: Collection[int]) -> None:
        """See `Ranks`. Kill the process as well as its group: just after a fork, a rank has no group of its own yet."""
        for rank in ranks:
            for kill in (os.kill, os.killpg):
                with suppress(ProcessLookupError, KeyError):
                    kill(self._pids[rank], signal.SIGKILL)

    def _signal(self, ranks: Collection[int], number: int) -> None:
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(self._pids[rank], number)


class PlainRanks(RankProcesses):
    """`Ranks` that are `nproc` new Python processes, children of this process. Each imports its modules itself."""

    def __init__(
        self,
        command: Sequence[str],
        nproc: int,
        variables: Mapping[str, str],
        run_dir: Path,
        output: RankOutput | None = None,
    ) -> None:
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        with listening_socket() as listener:
            for rank in range(nproc):
                own = {**variables, **rank_variables(rank, nproc, listener)}
                self._running[rank] = start_process(command, [listener.fileno()] * (rank == 0), own, output)
        super().__init__({rank: process.pid for rank, process in self._running.items()}, run_dir)

    def ended(self, wait_s: float) -> dict[int, RankExit]:
        end = time.monotonic() + wait_s
        while True:
            codes = {rank: code for rank, process in self._running.items() if (code := process.poll()) is not None}
            if codes or (left := end - time.monotonic()) <= 0:
                break
            time.sleep(min(left, 0.02))
        for rank in codes:
            del self._running[rank]
        return {rank: RankExit(code) for rank, code in codes.items()}


def _wait_until_written(files: Mapping[int, Path], before: Mapping[int, int]) -> None:
    """Wait until every file is longer than `before` and no file grows, at most DUMP_TIMEOUT_S."""
    end, last, quiet_since = time.monotonic() + DUMP_TIMEOUT_S, before, time.monotonic()
    while (now := time.monotonic()) < end:
        sizes = {rank: _size(path) for rank, path in files.items()}
        if sizes != last:
            last, quiet_since = sizes, now
        elif all(sizes[rank] > before[rank] for rank in files) and now - quiet_since > _SETTLED_S:
            return
        time.sleep(0.02)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def why_silent(process: int) -> str:
    """Return the likely reason why a process wrote no stacks, from its state in Linux's `/proc`."""
    state = state_of(process)
    if state in STOPPED:
        return "stopped, as by SIGSTOP or a debugger"
    if state == "D":
        return "blocked in the kernel: a disk, a network file system or a driver does not answer"
    return "no answer, probably because it is still importing modules"
