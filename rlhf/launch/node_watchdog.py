"""Watches the ranks of one node, in a process of its own, if torchrun or another launcher started the ranks.

A rank starts the watchdog (`rlhf.ranks.watchdog_process`). If the ranks hang, the watchdog logs the evidence and kills
the node's ranks. Then the launcher restarts the ranks.
"""

import signal

from rlhf.ranks.stop import STOP_SIGNALS

if __name__ == "__main__":
    # Ignore the signals before the slow imports: SLURM signals all processes of a job, and the watchdog must watch the
    # ranks while they save.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)

import json
import logging
import os
import select
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from rlhf.config.redaction import Redaction
from rlhf.config.resolved import load
from rlhf.launch.evidence import describe_hang
from rlhf.launch.hangs import LOOK_EVERY_S, HangDetector
from rlhf.launch.local.processes import RankProcesses
from rlhf.ranks.logs import configure_logging
from rlhf.ranks.parent import start_time_of
from rlhf.storage.layout import RESOLVED, RUN_LOG, scan

if TYPE_CHECKING:
    from torch.distributed import TCPStore

REPORT_EVERY_S = 2.0
SILENCE_S = 10.0
"""Seconds without a report after which all ranks of another node count as overdue. After a hang, also the longest time
that a node waits until the other nodes have logged their evidence."""
STORE_TIMEOUT_S = 5.0

log = logging.getLogger(__name__)


class OtherNodes:
    """Exchanges counters with the other nodes through the store of the process group.

    A node raises its counter while a rank of the node is within its deadline. Otherwise the node reads the other nodes'
    counters. A store that does not answer counts as silence, because the rank that serves the store may hang.

    `attempt` identifies this start of the ranks, because torchrun keeps the store when it restarts the ranks.
    """

    def __init__(self, store: "TCPStore", node: int, nodes: int, attempt: str) -> None:
        self._store, self._node, self._attempt = store, node, attempt
        self._others = [other for other in range(nodes) if other != node]
        self._reported_at: dict[bool, float] = {}
        self._last_counts: dict[bool, tuple[list[int], float]] = {}
        self._store_call: threading.Thread | None = None

    def report(self, *, save: bool) -> None:
        self._last_counts.pop(save, None)
        if time.monotonic() - self._reported_at.get(save, float("-inf")) >= REPORT_EVERY_S:
            self._reported_at[save] = time.monotonic()
            self._count(self._node, _phase(save), 1)

    def are_silent(self, *, save: bool) -> bool:
        """Return True if for SILENCE_S seconds no call saw another node's counter change, or if a node found a hang."""
        counts, now = [self._count(other, _phase(save), 0) for other in self._others], time.monotonic()
        before, since = self._last_counts.get(save, ([], now))
        if counts != before:
            since = now
        self._last_counts[save] = counts, since
        return now - since >= SILENCE_S or any(self._count(other, "hang", 0) > 0 for other in self._others)

    def announce_hang(self) -> None:
        """Announce that this node has found a hang and logged the evidence. Wait until all nodes have announced it.

        Once one node kills its ranks, the ranks of all nodes fail, and their stacks are lost. Wait at most SILENCE_S
        seconds.
        """
        end = time.monotonic() + SILENCE_S
        self._count(self._node, "hang", 1)
        while time.monotonic() < end and any(self._count(other, "hang", 0) <= 0 for other in self._others):
            time.sleep(LOOK_EVERY_S)

    def _count(self, node: int, counter: str, increment: int) -> int:
        """Add `increment` to a node's counter, and return the sum; -1 without an answer within STORE_TIMEOUT_S."""
        if self._store_call is not None and self._store_call.is_alive():
            return -1
        answers: SimpleQueue[int] = SimpleQueue()

        def add() -> None:
            with suppress(RuntimeError):
                answers.put(self._store.add(f"rlhf/watchdog/{self._attempt}/{node}/{counter}", increment))

        # If the process of the store is stopped, `add` waits forever, whatever the timeout of the store.
        self._store_call = threading.Thread(target=add, name="store", daemon=True)
        self._store_call.start()
        self._store_call.join(STORE_TIMEOUT_S)
        try:
            return answers.get_nowait()
        except Empty:
            return -1


def _phase(save: bool) -> str:
    return "save" if save else "loop"


def _other_nodes(node: int, nodes: int, attempt: str) -> OtherNodes | None:
    if nodes == 1:
        return None
    from rlhf.ranks.collectives import connect_to_store

    return OtherNodes(connect_to_store(timedelta(seconds=STORE_TIMEOUT_S)), node, nodes, attempt)


def watch(run_dir: Path, pids: Mapping[int, int], others: OtherNodes | None) -> None:
    """Watch the ranks of this node (`pids`, by rank) until all have ended. If they hang, kill all ranks of the node.

    stdin is a pipe from the lowest rank. The rank closes the pipe when it no longer needs the watchdog.
    """
    config = load(run_dir / RESOLVED)
    ranks, births = RankProcesses(pids, run_dir), {rank: start_time_of(pid) for rank, pid in pids.items()}
    detector, pipe = HangDetector(config.trainer, config.checkpoint.timeout_s, others), [sys.stdin]
    detector.start(pids)
    while alive := [rank for rank, pid in pids.items() if births[rank] and start_time_of(pid) == births[rank]]:
        if (hang := detector.look(ranks, alive)) is not None:
            checkpoint = next(iter(scan(run_dir)), None)
            evidence = describe_hang(hang, ranks.statuses(), checkpoint, config.trainer)
            _log(
                run_dir,
                f"Hang: {evidence}\nThe watchdog kills this node's ranks. Their launcher restarts the run.",
            )
            if others is not None:
                others.announce_hang()
            ranks.kill(alive)
            return
        if select.select(pipe, [], [], LOOK_EVERY_S)[0]:
            pipe, births[min(pids)] = [], None


def _log(run_dir: Path, text: str) -> None:
    from rlhf.tracking.run_output import OutputHandler, RunOutput

    with RunOutput("plain", Redaction(os.environ)) as output:
        configure_logging(handler=OutputHandler(output), who="watchdog")
        output.open_log(run_dir / RUN_LOG)
        log.error("%s", text)


if __name__ == "__main__":
    folder, pids, node, nodes, attempt = sys.argv[1:]
    pid_by_rank = {int(rank): pid for rank, pid in json.loads(pids).items()}
    watch(Path(folder), pid_by_rank, _other_nodes(int(node), int(nodes), attempt))
