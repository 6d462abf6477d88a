"""The rollout servers of a run, watched all the time by a thread of the leader's: ours are started again, requests find one that serves."""

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, TypeVar

import aiohttp

from rlhf.config.rollout import ServersConfig
from rlhf.errors import UserError
from rlhf.rollout.servers.client import Ask, ServerClient, ServerFailure, StaleAnswer
from rlhf.rollout.servers.health import Budget, ServerHealth
from rlhf.rollout.types import Request, Sample, SamplingParams
from rlhf.rollout.vllm.versions import server_problem

log = logging.getLogger(__name__)
T = TypeVar("T")
Outcome = Literal["ready", "weights", "done"]

TICK_S = 0.25
"""Between two looks at the servers when nothing happens."""
CLOSE_S = 60.0


class ServersFailed(RuntimeError):
    """The rollout servers failed more often than rollout.servers.max_failures allows."""


class Process(Protocol):
    """A server that we start ourselves."""

    @property
    def url(self) -> str: ...

    def start(self) -> None: ...

    def poll(self) -> int | None: ...

    def kill(self) -> None: ...


@dataclass(frozen=True)
class Work:
    """A request with what it takes to send it to a server."""

    request: Request
    params: SamplingParams
    seed: int


@dataclass
class _Member:
    health: ServerHealth
    client: ServerClient
    url: str
    process: Process | None = None
    log: Path | None = None
    starts: int = 0
    pushing: bool = False
    load: int = 0
    """Samples in flight."""
    asks: dict[asyncio.Task, int] = field(default_factory=dict)
    """Which work each of its tasks is about."""
    probe: asyncio.Task | None = None
    silence: str = "nothing was heard of it"
    """What the last probe met."""


@dataclass
class _Generation:
    work: Sequence[Work]
    queue: deque[int]
    samples: dict[int, list[Sample]] = field(default_factory=dict)


class Fleet:
    """Lives on the leader. Every method may be called from one thread at a time; the servers live in a thread of the fleet's own.

    `processes`: the servers that we start, by their log files; with none, the servers are `settings.urls`. `capacity`: samples that a
    server decodes together. A `label` names weights: only servers with the one that is wanted are asked, and answers by others are refused.
    """

    def __init__(self, settings: ServersConfig, processes: Mapping[Path, Process], ask: Ask, *, capacity: int) -> None:
        self._settings, self._processes, self._ask, self._capacity = settings, processes, ask, capacity
        self._budget = Budget(settings.max_failures)
        self._members: list[_Member] = []
        self._generation: _Generation | None = None
        self._label, self._version = "", 0
        self._counts: Counter[str] = Counter()
        self._error: BaseException | None = None
        self._closing = False
        self._began = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rollout servers", daemon=True)
        self._thread.start()
        self._began.wait()

    # Called by the leader's own thread.

    def wait(self, seconds: float, generating: bool = True) -> Outcome | None:
        """What the fleet has come to, or None after so many seconds.

        `weights`: the generation cannot go on before a server gets weights. Without one, `ready`: a server lives.

        Raises:
            ServersFailed: the budget is spent; the text names each server, its last failures and its log.
            UserError: a server runs a release of vLLM that is not supported, or refuses a request.
        """
        return self._call(lambda: self._until(self._ended if generating else self._ready, seconds))

    def want(self, label: str, version: int) -> list[str]:
        """From now on only the weights `label`, those after `version` steps, are good enough: the servers to push them to.

        They are left alone until `pushed`.
        """

        def action() -> list[str]:
            self._label, self._version = label, version
            for member in self._members:
                member.health.want(label)
            stale = [member for member in self._members if member.health.state == "stale"]
            for member in stale:
                member.pushing = True
                self._drop(member)
            return [member.url for member in stale]

        return self._do(action)

    def pushed(self, label: str, errors: dict[str, str | None]) -> None:
        """How the push to the servers of `want` ended: by URL None, or what went wrong."""

        def action() -> None:
            for member in self._members:
                if member.pushing:
                    member.pushing = False
                    error = errors.get(member.url, "it was left out of the push")
                    member.health.pushed(time.monotonic(), label, error)
                    if error is not None:
                        self._tell_failure(member, f"the push of the weights failed: {error}")

        self._do(action)

    def begin(self, work: Sequence[Work]) -> None:
        """Start to generate; `wait` tells how it goes, `take` ends it."""

        def action() -> None:
            self._generation = _Generation(work, deque(range(len(work))))
            self._budget.needed = True
            self._wake.set()

        self._do(action)

    def take(self) -> list[list[Sample]]:
        """The samples of each piece of work, in their order, once `wait` has said `done`."""

        def action() -> list[list[Sample]]:
            generation, self._generation = self._generation, None
            assert generation is not None
            return [generation.samples[i] for i in range(len(generation.work))]

        return self._do(action)

    def metrics(self) -> dict[str, float]:
        """What happened since the last call."""

        def action() -> dict[str, float]:
            counts, self._counts = self._counts, Counter()
            return {
                "rollout/servers_serving": float(sum(m.health.state == "serving" for m in self._members)),
                **{
                    f"rollout/{name}": float(counts[name])
                    for name in ("server_failures", "server_restarts", "requests_repeated", "stale_answers")
                },
            }

        return self._do(action)

    def close(self) -> None:
        """End the thread, and the servers that it has started."""
        self._closing = True
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.error("The thread of the rollout servers did not end within %g s.", CLOSE_S)

    def _do(self, action: Callable[[], T]) -> T:
        async def run() -> T:
            return action()

        return self._call(run)

    def _call(self, action: Callable[[], Awaitable[T]]) -> T:
        async def run() -> T:
            return await action()

        if self._error is not None or not self._thread.is_alive():
            raise self._error or RuntimeError("the rollout servers are closed")
        try:
            return asyncio.run_coroutine_threadsafe(run(), self._loop).result()
        except Exception:
            if self._error is not None:
                raise self._error from None
            raise

    # Everything below runs in the fleet's thread.

    def _run(self) -> None:
        try:
            asyncio.run(self._watch())
        except BaseException as error:  # raised again in the leader's own thread
            self._error = error
        finally:
            self._began.set()
            with ExitStack() as stack:
                for process in self._processes.values():
                    stack.callback(process.kill)

    async def _watch(self) -> None:
        self._loop, self._wake, self._news = asyncio.get_running_loop(), asyncio.Event(), asyncio.Condition()
        # A connection that was kept may be closed by the server at the moment that it is used again.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector) as self._session:
            now = time.monotonic()
            if self._processes:
                self._members = [self._member("", now, process, log) for log, process in self._processes.items()]
            else:
                self._members = [self._member(url.rstrip("/"), now) for url in self._settings.urls]
            self._began.set()
            while not self._closing:
                for member in self._members:
                    self._tend(member, time.monotonic())
                self._dispatch()
                async with self._news:
                    self._news.notify_all()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), TICK_S)
                self._wake.clear()

    def _member(self, url: str, now: float, process: Process | None = None, log: Path | None = None) -> _Member:
        health = ServerHealth(self._settings, self._budget, ours=process is not None, now=now)
        client = ServerClient(self._session, url, self._ask, self._settings.answer_timeout_s)
        return _Member(health, client, url, process, log)

    async def _until(self, ready: Callable[[], Outcome | None], seconds: float) -> Outcome | None:
        """What `ready` says once it says something; meanwhile the fleet is needed."""
        self._budget.needed = True
        end = time.monotonic() + seconds
        async with self._news:
            while (outcome := ready()) is None and (left := end - time.monotonic()) > 0:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), left)
        if outcome is not None:
            self._budget.needed = False
        return outcome

    def _ready(self) -> Outcome | None:
        self._check()
        return "ready" if any(m.health.state in ("stale", "serving") for m in self._members) else None

    def _ended(self) -> Outcome | None:
        self._check()
        assert self._generation is not None
        if len(self._generation.samples) == len(self._generation.work):
            return "done"
        states = {m.health.state for m in self._members}
        return "weights" if "stale" in states and "serving" not in states else None

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._budget.spent:
            servers = "\n".join(f"  {_told(member)}" for member in self._members)
            raise ServersFailed(
                f"The rollout servers failed {self._budget.in_a_row} times without a finished request between the failures "
                f"(rollout.servers.max_failures={self._budget.max_failures}):\n{servers}"
            )

    def _tend(self, member: _Member, now: float) -> None:
        """Notice what happened to a server, do what is due."""
        if member.pushing:  # what is wrong with it now comes out by the push
            return
        health, process = member.health, member.process
        if process is not None and member.starts and (code := process.poll()) is not None:
            if health.state == "dead":
                health.ended()
            else:
                self._fail(member, f"its process ended with exit code {code}", gone=True)
        elif reason := health.overdue(now):
            silent = f"; last: {member.silence}" if health.state == "starting" else ""
            self._fail(member, reason + silent, gone=True)
        due = health.due(now)
        if due == "start":
            self._start(member)
        elif due == "probe" and member.probe is None:
            health.probing(now)
            member.probe = asyncio.create_task(self._probe(member))

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
        member.client = ServerClient(self._session, member.url, self._ask, self._settings.answer_timeout_s)
        member.silence = "nothing was heard of it"
        member.health.started(time.monotonic())
        member.starts += 1
        if member.starts > 1:
            self._counts["server_restarts"] += 1
        log.info(
            "Rollout server %s: %s, log in %s.", member.url, "restarted" if member.starts > 1 else "started", member.log
        )

    async def _probe(self, member: _Member) -> None:
        health, before = member.health, member.health.state
        try:
            if before == "starting" and (problem := server_problem(await member.client.version())):
                raise UserError(f"The rollout server {member.url} cannot be used: {problem}.")
            label = await member.client.weight_label()
        except ServerFailure as failure:
            member.silence = str(failure)
            if before != "starting":
                self._fail(member, str(failure), gone=failure.hung)
        except Exception as error:
            self._error = error
        else:
            failures = health.failures
            health.probed(time.monotonic(), label)
            if health.failures > failures:
                self._counts["server_failures"] += 1
                log.warning("Rollout server %s: %s.", member.url, health.reasons[-1])
            if before == "starting":
                log.info("Rollout server %s is up, with the weights %r.", member.url, label)
        finally:
            member.probe = None
            self._wake.set()

    def _dispatch(self) -> None:
        """Hand out the queue, each request to the server with the least in flight, up to the capacity of each."""
        generation = self._generation
        while generation is not None and generation.queue:
            n = generation.work[generation.queue[0]].params.n
            serving = [m for m in self._members if m.health.state == "serving"]
            free = [m for m in serving if not m.load or m.load + n <= self._capacity]
            if not free:
                return
            member, index = min(free, key=lambda m: m.load), generation.queue.popleft()
            member.load += n
            member.health.asked(time.monotonic())
            member.asks[asyncio.create_task(self._send(member, generation, index))] = index

    async def _send(self, member: _Member, generation: _Generation, index: int) -> None:
        work, task = generation.work[index], asyncio.current_task()
        assert task is not None
        try:
            samples = await member.client.generate(work.request, work.params, work.seed, self._label, self._version)
        except ServerFailure as failure:
            if task in member.asks:
                self._fail(member, str(failure), gone=failure.hung)
        except StaleAnswer as stale:
            if task in member.asks:
                self._counts["stale_answers"] += 1
                self._counts["server_failures"] += 1
                self._drop(member)
                member.health.outdated(str(stale))
                log.warning("Rollout server %s: %s; it needs them anew.", member.url, stale)
        except Exception as error:
            self._error = error
        else:
            # Whoever was dropped has its request in the queue again.
            if member.asks.pop(task, None) is not None:
                generation.samples[index] = samples
                member.load -= work.params.n
                member.health.finished(time.monotonic())
        finally:
            self._wake.set()

    def _fail(self, member: _Member, reason: str, *, gone: bool = False) -> None:
        member.health.failed(time.monotonic(), reason, gone=gone)
        self._tell_failure(member, reason)
        self._drop(member)
        if gone and member.process is not None:
            member.process.kill()

    def _tell_failure(self, member: _Member, reason: str) -> None:
        self._counts["server_failures"] += 1
        log.warning("Rollout server %s: %s. Next try in %g s.", member.url, reason, member.health.backoff_s)

    def _drop(self, member: _Member) -> None:
        """Its requests go back to the queue, before those that were never sent."""
        asks, member.asks, member.load = member.asks, {}, 0
        if asks and self._generation is not None:
            self._counts["requests_repeated"] += len(asks)
            self._generation.queue.extendleft(sorted(asks.values(), reverse=True))
        for task in [*asks, member.probe]:
            if task is not None and task is not asyncio.current_task():
                task.cancel()


def _told(member: _Member) -> str:
    where = f"log: {member.log}" if member.log is not None else "given by rollout.servers.urls"
    return f"{member.url}: {member.health.state}; {'; '.join(member.health.reasons) or 'no failure'}; {where}"
