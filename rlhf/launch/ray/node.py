"""Runs the ranks of one machine in a worker of Ray. Ray calls `run_node` in a thread of the worker."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rlhf.errors import EXIT_CRASHED, EXIT_DONE, EXIT_REQUEUE, EXIT_USER_ERROR
from rlhf.launch.evidence import furthest_step
from rlhf.launch.ray.endings import RanksEnded, code_of, in_words
from rlhf.ranks.parent import PARENT_PID
from rlhf.ranks.status import RankStatus, read_statuses
from rlhf.ranks.world import LOCAL_WORLD_SIZE, STORE_FD

PEERS_S = 5.0
"""Seconds after a crash to wait for the other ranks' exit codes: a rank may crash because a peer left with a user's
mistake."""
_LOOK_S = 0.2
_ASK_S = 2.0
_LAST_LINES_S = 2.0
_LONGEST_ERROR = 50
_MODULE = "rlhf.launch.ray.rank"
_DEVICES = "_VISIBLE_DEVICES"
_KINDS = {EXIT_USER_ERROR: "user", EXIT_REQUEUE: "unsaved", EXIT_CRASHED: "crash"}
"""Kind of the error that a rank with this exit code leaves in its status file."""


@dataclass(frozen=True)
class NodeJob:
    """The job of each machine, as the driver sends it."""

    config: str
    """The resolved configuration as YAML, with secrets as references to environment variables."""
    recipes: tuple[str, ...]
    nproc: int
    run_dir: Path
    folder: Path
    """The user's working directory."""
    environment: Mapping[str, str]
    """The driver's environment. The ranks inherit it, as under srun."""
    grace_s: float
    """Seconds between a request to stop and SIGKILL."""
    changes: str
    """The result of `changes_to_continue`."""
    look: Callable[[str, int], tuple[bool, bool]]
    """Returns whether the driver was asked to stop, and whether a machine has room for this attempt to grow. The
    arguments are the attempt's name and its number of machines."""


class StopNotices:
    """Checks whether the ranks must save and leave: the driver asks, a machine goes away, or another one has room."""

    def __init__(self, job: NodeJob, attempt: str, machines: int) -> None:
        self._job, self._attempt, self._machines = job, attempt, machines
        self._asked_at = 0.0
        self.continues = self.stops = False

    def look(self, *, now: bool = False) -> bool:
        """Return whether the ranks must leave. With `now`, ask at once; otherwise ask at most every two seconds."""
        if not (self.continues or self.stops) and (now or time.monotonic() - self._asked_at >= _ASK_S):
            self._asked_at = time.monotonic()
            self.stops, grows = self._job.look(self._attempt, self._machines)
            self.continues = grows or _loses_a_machine()
        return self.continues or self.stops


class RankProcess:
    """Runs a rank as a process. Copies the rank's stderr to the worker's stderr, and stores the last error."""

    def __init__(self, process: "subprocess.Popen[str]", errors: IO[str]) -> None:
        self.process, self._error = process, list[str]()
        self._reader = threading.Thread(target=self._copy, args=(errors,), daemon=True)
        self._reader.start()

    def error(self) -> str | None:
        """Return the text after the last `error: `, once the rank has ended; None if the rank wrote no error."""
        self._reader.join(_LAST_LINES_S)
        return "".join(self._error).strip() or None

    def _copy(self, lines: IO[str]) -> None:
        for line in lines:
            sys.stderr.write(line)
            sys.stderr.flush()
            _, found, message = line.partition("error: ")
            if found:
                self._error = [message]
            elif 0 < len(self._error) < _LONGEST_ERROR:
                self._error.append(line)


def _loses_a_machine() -> bool:
    """Return whether Ray has announced that a machine of the run goes away.

    `ray.train.get_preemption_info` would return the same fact, but it waits until every worker calls it, and a worker
    whose ranks have ended does not call it.
    """
    from ray.train.v2._internal.execution.context import get_train_context

    return get_train_context().preemption_context.preemption_info is not None


def run_node(job: NodeJob) -> None:
    """Start `job.nproc` ranks and wait for their end. Collective over the workers.

    Raises:
        RanksEnded: the ranks did not finish the run.
    """
    import ray.train
    import ray.train.collective

    context = ray.train.get_context()
    node, nodes = context.get_world_rank(), context.get_world_size()
    listener = socket.create_server((ray.util.get_node_ip_address(), 0)) if node == 0 else None
    own = (*listener.getsockname()[:2], uuid.uuid4().hex) if listener else None
    host, port, attempt = ray.train.collective.broadcast_from_rank_zero(own)
    ranks: dict[int, RankProcess] = {}
    notices = StopNotices(job, attempt, nodes)
    try:
        if not job.folder.is_dir():
            message = f"The working directory {job.folder} is missing on a machine. Start in a shared folder."
            raise RanksEnded(EXIT_USER_ERROR, None, False, message)
        for local in range(job.nproc):
            rank = node * job.nproc + local
            variables = _variables(job, rank, nodes * job.nproc, (host, port))
            ranks[rank] = _start(job, variables, listener if rank == 0 else None)
        codes = _wait(ranks, notices, job.grace_s)
    finally:
        _signal(ranks, signal.SIGKILL)
        if listener is not None:
            listener.close()
    if EXIT_REQUEUE in codes.values():
        notices.look(now=True)  # the ranks may have left because another machine's worker saw the notice first
    code = code_of(codes.values(), job.nproc, stopped=notices.continues or notices.stops)
    if code in (EXIT_DONE, EXIT_REQUEUE):
        # With the first worker that ends, Ray would kill the others, whose ranks may still close their trackers.
        _wait_for_peers(ray.train.collective.barrier, job.grace_s)
    if code != EXIT_DONE:
        statuses = read_statuses(job.run_dir, ranks)
        raise RanksEnded(
            code, furthest_step(statuses), notices.continues, _message(code, codes, ranks, statuses, job.changes)
        )


def _wait_for_peers(barrier: Callable[[], None], grace_s: float) -> None:
    """Wait until the ranks of all machines have ended, but at most `grace_s` seconds: Ray's barrier has no deadline."""
    waiting = threading.Thread(target=barrier, daemon=True)
    waiting.start()
    waiting.join(grace_s)
    if waiting.is_alive():
        sys.stderr.write(f"Ranks of another machine have not ended within trainer.preempt_grace_s={grace_s:g}.\n")


def _variables(job: NodeJob, rank: int, world_size: int, address: tuple[str, int]) -> dict[str, str]:
    """Return torchrun's variables for a rank, and this worker's devices in place of the driver's."""
    kept = {name: value for name, value in job.environment.items() if not name.endswith(_DEVICES)}
    devices = {name: value for name, value in os.environ.items() if name.endswith(_DEVICES)}
    return {
        **kept,
        **devices,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % job.nproc),
        "WORLD_SIZE": str(world_size),
        LOCAL_WORLD_SIZE: str(job.nproc),
        "MASTER_ADDR": address[0],
        "MASTER_PORT": str(address[1]),
        PARENT_PID: str(os.getpid()),
    }


def _start(job: NodeJob, variables: dict[str, str], listener: socket.socket | None) -> RankProcess:
    """Start a rank, which dies with this worker."""
    if listener is not None:
        variables[STORE_FD] = str(listener.fileno())
    process = subprocess.Popen(
        [sys.executable, "-m", _MODULE],
        cwd=job.folder,
        env=variables,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=[] if listener is None else [listener.fileno()],
        start_new_session=True,
        text=True,
    )
    assert process.stdin is not None
    assert process.stderr is not None
    rank = RankProcess(process, process.stderr)
    with suppress(BrokenPipeError), process.stdin:  # `_wait` finds a rank that died at once
        json.dump({"config": job.config, "recipes": job.recipes}, process.stdin)
    return rank


def _wait(ranks: Mapping[int, RankProcess], notices: StopNotices, grace_s: float) -> dict[int, int]:
    """Return the exit codes of ended ranks, once all have ended, one has failed, or `grace_s` seconds after a stop."""
    failed_at = stopped_at = None
    while True:
        codes = {rank: code for rank, each in ranks.items() if (code := each.process.poll()) is not None}
        now = time.monotonic()
        failed = [code for code in codes.values() if code not in (EXIT_DONE, EXIT_REQUEUE)]
        # A signal or a user error is never the consequence of a peer's end, so do not wait for the peers.
        if EXIT_USER_ERROR in failed or any(code < 0 for code in failed):
            return codes
        failed_at = failed_at or (now if failed else None)
        if failed_at is not None and now - failed_at > PEERS_S:
            return codes
        if not failed and len(codes) == len(ranks):
            return codes
        if stopped_at is None and notices.look():
            stopped_at = now
            _signal(ranks, signal.SIGTERM)
        if stopped_at is not None and now - stopped_at > grace_s:
            return codes
        time.sleep(_LOOK_S)


def _signal(ranks: Mapping[int, RankProcess], number: signal.Signals) -> None:
    for each in ranks.values():
        if each.process.poll() is None:
            each.process.send_signal(number)


def _message(
    code: int,
    codes: Mapping[int, int],
    ranks: Mapping[int, RankProcess],
    statuses: Mapping[int, RankStatus],
    changes: str,
) -> str:
    """Return the message of the rank whose exit code decided, or how the ranks of this machine ended."""
    for rank in codes:
        if codes[rank] == code:
            # If a rank finds a mistake early, its status file is still an earlier command's.
            if code == EXIT_USER_ERROR and (written := ranks[rank].error()) is not None:
                return written
            status = statuses.get(rank)
            # An error of another kind is from an earlier attempt.
            if status is not None and status.error is not None and status.error.kind == _KINDS[code]:
                return status.error.message
    if code == EXIT_REQUEUE:
        return f"The ranks were asked to stop. The same command{changes} continues the run."
    ended = [in_words(rank, end) for rank, end in codes.items() if end != EXIT_DONE]
    return f"{', '.join(ended) or 'the ranks were killed'} on {socket.gethostname()}; see the messages above"
