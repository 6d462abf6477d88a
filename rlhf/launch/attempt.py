"""One attempt: the ranks of this machine started through torch.distributed.elastic, watched until the last of them has
ended.

Elastic's agent gives the rendezvous, the rank variables and the processes. Its way of ending them doesn't fit: after
the first failure it sends SIGTERM, which in our ranks means "save", and waits a fixed 30 s for ranks that may be stuck
in a collective with a dead peer. `RankAgent` therefore lets elastic look only once every rank has ended, and does the
waiting and killing itself.
"""

import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from subprocess import Popen

import torch.distributed.elastic.rendezvous.registry as rendezvous_registry
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SubprocessContext
from torch.distributed.elastic.rendezvous import RendezvousParameters

from rlhf.errors import EXIT_DONE, EXIT_REQUEUE, EXIT_USER_ERROR
from rlhf.launch.evidence import AttemptResult, Hang
from rlhf.launch.hangs import HangDetector
from rlhf.launch.stop_request import StopRequest
from rlhf.ranks.parent import SUPERVISOR_PID

# Long enough for the peers of a dead rank to notice and write down what they saw; NCCL peers never notice by
# themselves.
PEER_GRACE_S = 5.0
# A process that SIGKILL doesn't end sits in the kernel (a wedged GPU or disk); elastic then gives up on it.
_KILL_PATIENCE_S = 10.0

log = logging.getLogger(__name__)


class RankAgent(LocalElasticAgent):
    """Elastic's agent with our rule for ending ranks.

    A rank that crashed or met a user error gives its peers `PEER_GRACE_S`; a stop request, or a rank that left to be
    requeued, gives all of them `grace_s`; then, at a second signal, or when `detector` finds a hang, what is left is killed.
    """

    def __init__(self, spec: WorkerSpec, stop: StopRequest, grace_s: float, detector: HangDetector | None) -> None:
        # devnull keeps elastic from leaving a directory in /tmp per attempt; the ranks' output goes where ours goes.
        super().__init__(spec, logs_specs=DefaultLogsSpecs(log_dir=os.devnull))
        self._stop = stop
        self._grace_s = grace_s
        self._detector = detector
        self._deadline = float("inf")
        self._asked = False
        self._killed_at: float | None = None
        self.exits: dict[int, int] = {}
        self.first: tuple[int, ...] = ()
        self.killed: frozenset[int] = frozenset()
        self.hang: Hang | None = None

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        context = self._pcontext
        assert isinstance(context, SubprocessContext)
        ranks = {w.global_rank: context.subprocess_handlers[w.local_rank].proc for w in worker_group.workers}
        now = time.monotonic()
        self._note_exits(ranks, now)
        alive = ranks.keys() - self.exits.keys()
        if self._stop.signal_name and not self._asked:
            self._asked = True
            self._deadline = min(self._deadline, self._stop.at + self._grace_s)
            for rank in alive:
                ranks[rank].send_signal(signal.SIGUSR1)
            log.info(
                "%s: the ranks save at the next safe point and leave, within %g s (trainer.preempt_grace_s). "
                "A second SIGTERM or Ctrl-C kills them at once.",
                self._stop.signal_name,
                self._grace_s,
            )
        if self._detector is not None and alive and self._killed_at is None:
            self.hang = self._detector.look({rank: ranks[rank].pid for rank in alive})
            if self.hang is not None:
                self._deadline = now
        if self._killed_at is None and (self._stop.kill or now >= self._deadline):
            self._killed_at = now
            self.killed = frozenset(alive)
            for rank in alive:
                _kill_group(ranks[rank])
        if alive and (self._killed_at is None or now < self._killed_at + _KILL_PATIENCE_S):
            return RunResult(state=WorkerState.HEALTHY)
        return super()._monitor_workers(worker_group)

    def _note_exits(self, ranks: Mapping[int, Popen[bytes]], now: float) -> None:
        failed = []
        for rank in ranks.keys() - self.exits.keys():
            code = ranks[rank].poll()
            if code is None:
                continue
            self.exits[rank] = code
            if code == EXIT_DONE:
                continue
            failed.append(rank)
            self._deadline = min(self._deadline, now + (self._grace_s if code == EXIT_REQUEUE else PEER_GRACE_S))
            if code not in (EXIT_REQUEUE, EXIT_USER_ERROR):
                _kill_group(ranks[rank])  # its reward processes and the like, orphans by now
        if not self.first:
            self.first = tuple(sorted(failed))


def _kill_group(process: Popen[bytes]) -> None:
    """SIGKILL to a rank and its children; elastic starts each rank as the leader of a session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def run_attempt(
    command: Sequence[str],
    nproc: int,
    env: Mapping[str, str],
    stop: StopRequest,
    grace_s: float,
    detector: HangDetector | None,
) -> AttemptResult:
    """Start `python *command` as `nproc` ranks and wait until all have ended. Call it from the main thread."""
    if detector is not None:
        detector.start(nproc)
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint="localhost:0",
        run_id=uuid.uuid4().hex,
        min_nodes=1,
        max_nodes=1,
        local_addr="localhost",
    )
    spec = WorkerSpec(
        role="rank",
        local_world_size=nproc,
        entrypoint=sys.executable,
        args=tuple(command),
        rdzv_handler=rendezvous_registry.get_rendezvous_handler(parameters),
        max_restarts=0,
        local_addr="localhost",
    )
    agent = RankAgent(spec, stop, grace_s, detector)
    # Elastic copies our environment into the ranks, and would put its own handlers over those of `stop` unless told of
    # no signal.
    with _environment({**env, SUPERVISOR_PID: str(os.getpid()), "TORCHELASTIC_SIGNALS_TO_HANDLE": ""}):
        try:
            agent.run()
        finally:
            spec.rdzv_handler.shutdown()
    return AttemptResult(agent.exits, agent.first, agent.killed, agent.hang)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
