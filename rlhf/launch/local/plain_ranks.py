"""Ranks that the supervisor starts itself, each with imports of its own."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlhf.launch.local.processes import RankProcesses
from rlhf.launch.local.rank_output import RankOutput
from rlhf.launch.rank_group import RankExit
from rlhf.ranks.parent import PARENT_PID
from rlhf.ranks.world import listening_socket, rank_variables


class PlainRanks(RankProcesses):
    """A `RankGroup` of `nproc` children of this process."""

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
                own = rank_variables(rank, nproc, listener) | {PARENT_PID: str(os.getpid())}
                fds = [listener.fileno()] if rank == 0 else []
                self._running[rank] = subprocess.Popen(
                    [sys.executable, *command],
                    env={**os.environ, **variables, **(output.variables if output else {}), **own},
                    pass_fds=[*fds, output.progress_fd] if output else fds,
                    stdout=output.stdout if output else None,
                    stderr=output.stderr if output else None,
                    start_new_session=True,
                )
        super().__init__({rank: process.pid for rank, process in self._running.items()}, run_dir)

    def ended(self, wait_s: float) -> dict[int, RankExit]:
        """See `RankGroup`."""
        end = time.monotonic() + wait_s
        while True:
            codes = {rank: code for rank, process in self._running.items() if (code := process.poll()) is not None}
            if codes or (left := end - time.monotonic()) <= 0:
                break
            time.sleep(min(left, 0.02))
        for rank in codes:
            del self._running[rank]
        return {rank: RankExit(code) for rank, code in codes.items()}
