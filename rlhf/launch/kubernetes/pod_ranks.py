"""Runs the ranks of one pod of a JobSet: `python -m rlhf.launch.kubernetes.pod_ranks [ARGUMENT ...]`.

The environment has MASTER_ADDR, MASTER_PORT, WORLD_SIZE, LOCAL_WORLD_SIZE, and the pod's number in
JOB_COMPLETION_INDEX. Each rank is a process of `python -m rlhf.train ARGUMENT ...`.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType

from rlhf.errors import EXIT_CRASHED, EXIT_DONE, EXIT_REQUEUE, EXIT_USER_ERROR
from rlhf.launch.evidence import AttemptResult, Ending, classify
from rlhf.launch.interface import RankExit
from rlhf.launch.scheduler_times import PEERS_S
from rlhf.planning.devices import usable_cores
from rlhf.ranks.stop import STOP_SIGNALS
from rlhf.ranks.world import LOCAL_WORLD_SIZE

INDEX = "JOB_COMPLETION_INDEX"
COMMAND = (sys.executable, "-m", "rlhf.train")
CRASH_WAIT_S = 10.0
"""Seconds to wait after a crash before the pod ends, because a user error on another pod ends the run only if that pod
ends first."""
CODES = {
    Ending.DONE: EXIT_DONE,
    Ending.USER_ERROR: EXIT_USER_ERROR,
    Ending.REQUEUE: EXIT_REQUEUE,
    Ending.CRASH: EXIT_CRASHED,
}
_LOOK_S = 0.1


class PodRanks:
    """Starts the ranks of this pod, passes stop signals on to the ranks, and waits until they end."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        number, first = int(environ[LOCAL_WORLD_SIZE]), int(environ[INDEX]) * int(environ[LOCAL_WORLD_SIZE])
        threads = {"OMP_NUM_THREADS": str(max(1, usable_cores() // number))}
        self._stopped = False
        self._processes: list[subprocess.Popen[bytes]] = []
        for each in STOP_SIGNALS:
            signal.signal(each, self._pass_on)
        for local in range(number):
            own = {"RANK": str(first + local), "LOCAL_RANK": str(local)}
            self._processes.append(subprocess.Popen(command, env={**threads, **environ, **own}))
            if self._stopped:  # the signal came before this rank started
                self._processes[-1].send_signal(signal.SIGTERM)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._stopped = True
        for process in self._processes:
            process.send_signal(number)

    def wait(self) -> int:
        """Return the exit code of the pod when all ranks have ended.

        PEERS_S seconds after the first rank's failure, kill the ranks that have not ended.
        """
        exits: dict[int, RankExit] = {}
        deadline = float("inf")
        while len(exits) < len(self._processes):
            for rank, process in enumerate(self._processes):
                if rank in exits or (code := process.poll()) is None:
                    continue
                exits[rank] = RankExit(code)
                if code != EXIT_DONE:
                    deadline = min(deadline, time.monotonic() + PEERS_S)
            if time.monotonic() > deadline:
                for process in self._processes:
                    process.kill()
            time.sleep(_LOOK_S)
        ending = classify(AttemptResult(exits, (), frozenset()), len(self._processes), self._stopped)
        if ending is Ending.CRASH:
            time.sleep(CRASH_WAIT_S)
        return CODES[ending]


if __name__ == "__main__":
    sys.exit(PodRanks([*COMMAND, *sys.argv[1:]], os.environ).wait())
