"""Runs the event loop of the fleet's thread: probes servers, restarts this run's own servers, and sends requests."""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import aiohttp

from rlhf.config.schema.rollout import ServersConfig
from rlhf.events import GENERATING, report
from rlhf.rollout.engine import Request, siblings
from rlhf.rollout.sample import Sample
from rlhf.rollout.servers.admission import Admission
from rlhf.rollout.servers.client import RequestSettings, ServerClient, ServerFailure, StaleAnswer
from rlhf.rollout.servers.health import Budget, ServerHealth
from rlhf.rollout.servers.secret import Secret
from rlhf.rollout.servers.server_process import ServerProcess
from rlhf.rollout.vllm.requests import request_seed

log = logging.getLogger(__name__)
FleetState = Literal["ready", "weights", "done"]

TICK_S = 0.25  # interval in seconds between checks of the servers without other events
NO_ANSWER = "no answer yet"


class ServersFailed(RuntimeError):
    """The rollout servers failed more often than rollout.servers.max_failures allows."""


@dataclass
class _Member:
    health: ServerHealth
    client: ServerClient
    url: str
    process: ServerProcess | None = None
    log: Path | None = None
    starts: int = 0
    pushing: bool = False
    load: int = 0  # number of samples in flight
    tasks: dict[asyncio.Task, int] = field(default_factory=dict)  # each task, with the index of the group that it sent
    probe: asyncio.Task | None = None
    probe_error: str = NO_ANSWER  # error of the last probe; empty if the probe succeeded


@dataclass
class _Generation:
    groups: Sequence[Sequence[Request]]  # requests for samples of one prompt; one HTTP request asks for a whole group
    seed: int
    step: int
    queue: deque[int]  # indices of the groups that are not sent yet
    samples: dict[int, list[Sample]] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(map(len, self.groups))


class FleetLoop:
    """State of the fleet; only its event loop accesses the state.

    Args:
        processes: servers that this run starts, by log file. If empty, the servers are `settings.urls`.
        request_settings: settings that all requests share.
        secret: sent to each server with every request.
        capacity: number of samples that a server decodes together.

    A `label` names weights: requests go only to servers with the wanted label, and other answers are rejected.
    """

    def __init__(
        self,
        settings: ServersConfig,
        processes: Mapping[Path, ServerProcess],
        request_settings: RequestSettings,
        secret: Secret,
        *,
        capacity: int,
    ) -> None:
        self.closing = False
        self.error: BaseException | None = None  # an error that no restart of a server fixes
        self._settings, self.processes, self._capacity = settings, processes, capacity
        self._request_settings = request_settings
        self._secret, self._admission = secret, Admission(secret)
        self._budget = Budget(settings.max_failures)
        self._members: list[_Member] = []
        self._generation: _Generation | None = None
        self._label, self._version = "", 0
        self._counts: Counter[str] = Counter()
        self._wake, self._news = asyncio.Event(), asyncio.Condition()

    async def run(self, began: Callable[[], None]) -> None:
        """Monitor the servers until `closing`; call `began` once the other methods are usable."""
        # Connections are not kept: the server may close a connection just when a request reuses it.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector) as self._session:
            now = time.monotonic()
            if self.processes:
                self._members = [self._member("", now, process, log) for log, process in self.processes.items()]
            else:
                self._members = [self._member(url.rstrip("/"), now) for url in self._settings.urls]
            began()
            while not self.closing:
                for member in self._members:
                    self._advance(member, time.monotonic())
                self._dispatch()
                async with self._news:
                    self._news.notify_all()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), TICK_S)
                self._wake.clear()

    def _member(self, url: str, now: float, process: ServerProcess | None = None, log: Path | None = None) -> _Member:
        health = ServerHealth(self._settings, self._budget, ours=process is not None, now=now)
        return _Member(health, self._client(url), url, process, log)

    def _client(self, url: str) -> ServerClient:
        return ServerClient(self._session, url, self._request_settings, self._settings.answer_timeout_s, self._secret)

    async def until(self, generating: bool, seconds: float) -> FleetState | None:
        """Wait as `Fleet.wait`."""
        outcome_now = self._ended if generating else self._ready
        self._budget.needed = True
        end = time.monotonic() + seconds
        async with self._news:
            while (outcome := outcome_now()) is None and (left := end - time.monotonic()) > 0:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), left)
        if outcome is not None:
            self._budget.needed = False
        return outcome

    def begin_push(self, label: str, version: int) -> list[str]:
        """Make `label` the wanted weights, after `version` steps. Return the URLs of live servers with other weights.

        These servers get no other calls until `end_push`.
        """
        self._label, self._version = label, version
        for member in self._members:
            member.health.expect_label(label)
        stale = [member for member in self._members if member.health.state == "stale"]
        for member in stale:
            member.pushing = True
            self._drop(member)
        return [member.url for member in stale]

    def end_push(self, label: str, errors: dict[str, str | None]) -> None:
        """Record the result of the push to the servers from `begin_push`. `errors`: by URL, None for success."""
        for member in self._members:
            if member.pushing:
                member.pushing = False
                error = errors.get(member.url, "the push skipped this server")
                member.health.pushed(time.monotonic(), label, error)
                if error is not None:
                    self._log_failure(member, f"the push of the weights failed: {error}")

    def begin(self, requests: Sequence[Request], seed: int, step: int) -> None:
        """Start to generate; `until` waits for the end, and `pop_samples` returns the samples."""
        groups = [[requests[i] for i in indices] for indices in siblings(requests)]
        self._generation = _Generation(groups, seed, step, deque(range(len(groups))))
        self._budget.needed = True
        self._wake.set()

    def pop_samples(self) -> list[Sample]:
        """Return the sample of each request, in order, after `until` has returned `done`."""
        generation, self._generation = self._generation, None
        assert generation is not None
        return [sample for i in range(len(generation.groups)) for sample in generation.samples[i]]

    def metrics(self) -> dict[str, float]:
        counts, self._counts = self._counts, Counter()
        names = ("server_failures", "server_restarts", "requests_repeated", "stale_answers")
        serving = sum(member.health.state == "serving" for member in self._members)
        return {"perf/servers_serving": float(serving)} | {f"perf/{name}": float(counts[name]) for name in names}

    def _ready(self) -> FleetState | None:
        self._check()
        return "ready" if any(m.health.state in ("stale", "serving") for m in self._members) else None

    def _ended(self) -> FleetState | None:
        self._check()
        assert self._generation is not None
        if len(self._generation.samples) == len(self._generation.groups):
            return "done"
        states = {m.health.state for m in self._members}
        return "weights" if "stale" in states and "serving" not in states else None

    def _check(self) -> None:
        if self.error is not None:
            raise self.error
        if self._budget.spent:
            servers = "\n".join(f"  {_describe(member)}" for member in self._members)
            raise ServersFailed(
                f"The rollout servers failed {self._budget.in_a_row} times without a finished request between the "
                f"failures (rollout.servers.max_failures={self._budget.max_failures}):\n{servers}"
            )

    def _advance(self, member: _Member, now: float) -> None:
        """Update a server's health, and start the action that is due."""
        if member.pushing:  # the push reports errors
            return
        health, process = member.health, member.process
        if process is not None and member.starts and (code := process.poll()) is not None:
            if health.state == "dead":
                health.ended()
            else:
                self._fail(member, f"its process ended with exit code {code}", gone=True)
        elif reason := health.overdue(now):
            silent = f"; last: {member.probe_error}" if member.probe_error else ""
            self._fail(member, reason + silent, gone=True)
        due = health.due(now)
        if due == "start":
            self._start(member)
        elif due == "probe" and member.probe is None:
            health.probing(now)
            member.probe = asyncio.create_task(self._probe(member))
        elif due == "count" and member.probe is None:
            health.counting(now)
            member.probe = asyncio.create_task(self._count(member))

    def _start(self, member: _Member) -> None:
        process = member.process
        assert process is not None
        try:
            process.kill()
            process.start()
        except OSError as error:
            self._fail(member, f"could not be started: {error}", gone=True)
            return
        member.url = process.url
        member.client = self._client(member.url)
        member.probe_error = NO_ANSWER
        member.health.started(time.monotonic())
        started = "restarted" if member.starts else "started"
        self._counts["server_restarts"] += bool(member.starts)
        member.starts += 1
        log.info("Rollout server %s: %s, log in %s.", member.url, started, member.log)

    async def _probe(self, member: _Member) -> None:
        health, starting = member.health, member.health.state == "starting"
        with self._probing(member, may_fail=starting):
            if starting:
                await self._admission.check(member.client, member.url, ours=member.process is not None)
            label = await member.client.weight_label()
            failures = health.failures
            health.probed(time.monotonic(), label)
            if health.failures > failures:
                self._counts["server_failures"] += 1
                log.warning("Rollout server %s: %s.", member.url, health.reasons[-1])
            if starting:
                log.info("Rollout server %s is up, with the weights %r.", member.url, label)

    async def _count(self, member: _Member) -> None:
        """Read the token count of a busy server. An error counts as a failure only when the deadline passes."""
        with self._probing(member, may_fail=True):
            member.health.counted(time.monotonic(), await member.client.tokens())

    @contextmanager
    def _probing(self, member: _Member, *, may_fail: bool) -> Iterator[None]:
        try:
            yield
            member.probe_error = ""
        except ServerFailure as failure:
            member.probe_error = str(failure)
            if not may_fail:
                self._fail(member, str(failure), gone=failure.hung)
        except Exception as error:
            self.error = error
        finally:
            member.probe = None
            self._wake.set()

    def _dispatch(self) -> None:
        """Send each queued group to the server with the fewest samples in flight, up to each server's capacity."""
        generation = self._generation
        while generation is not None and generation.queue:
            n = len(generation.groups[generation.queue[0]])
            serving = [m for m in self._members if m.health.state == "serving"]
            free = [m for m in serving if not m.load or m.load + n <= self._capacity]
            if not free:
                return
            member, index = min(free, key=lambda m: m.load), generation.queue.popleft()
            member.load += n
            member.health.request_sent(time.monotonic())
            member.tasks[asyncio.create_task(self._send(member, generation, index))] = index

    async def _send(self, member: _Member, generation: _Generation, index: int) -> None:
        group, task = generation.groups[index], asyncio.current_task()
        assert task is not None
        try:
            seed = request_seed(generation.seed, generation.step, group[0].uid) + group[0].sample
            samples = await member.client.generate(group, seed, self._label, self._version)
        except ServerFailure as failure:
            if task in member.tasks:
                self._fail(member, str(failure), gone=failure.hung)
        except StaleAnswer as stale:
            if task in member.tasks:
                self._counts["stale_answers"] += 1
                self._counts["server_failures"] += 1
                self._drop(member)
                member.health.outdated(str(stale))
                log.warning("Rollout server %s: %s; its weights are sent again.", member.url, stale)
        except Exception as error:
            self.error = error
        else:
            # The requests of a dropped server are queued again.
            if member.tasks.pop(task, None) is not None:
                generation.samples[index] = samples
                report(GENERATING, sum(map(len, generation.samples.values())), generation.total)
                member.load -= len(group)
                member.health.request_finished(time.monotonic())
        finally:
            self._wake.set()

    def _fail(self, member: _Member, reason: str, *, gone: bool = False) -> None:
        member.health.failed(time.monotonic(), reason, gone=gone)
        self._log_failure(member, reason)
        self._drop(member)
        if gone and member.process is not None:
            member.process.kill()

    def _log_failure(self, member: _Member, reason: str) -> None:
        self._counts["server_failures"] += 1
        log.warning("Rollout server %s: %s. Next try in %g s.", member.url, reason, member.health.backoff_s)

    def _drop(self, member: _Member) -> None:
        """Put the server's requests back at the head of the queue, and cancel its tasks."""
        tasks, member.tasks, member.load = member.tasks, {}, 0
        if tasks and self._generation is not None:
            self._counts["requests_repeated"] += len(tasks)
            self._generation.queue.extendleft(sorted(tasks.values(), reverse=True))
        for task in [*tasks, member.probe]:
            if task is not None and task is not asyncio.current_task():
                task.cancel()


def _describe(member: _Member) -> str:
    where = f"log: {member.log}" if member.log is not None else "given by rollout.servers.urls"
    return f"{member.url}: {member.health.state}; {'; '.join(member.health.reasons) or 'no failure'}; {where}"
