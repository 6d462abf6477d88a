"""Runs the event loop of the fleet's thread: probes servers, restarts this run's own servers, and sends requests."""

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from pathlib import Path
from typing import Literal

import aiohttp

from rlhf.config.schema.rollout import ServersConfig
from rlhf.rollout.engine import Quota, Request
from rlhf.rollout.sample import Sample
from rlhf.rollout.servers.admission import Admission
from rlhf.rollout.servers.client import RequestSettings, ServerClient, ServerFailure, StaleAnswer, open_session
from rlhf.rollout.servers.dispatch import Concurrency
from rlhf.rollout.servers.health import Budget, ServerHealth
from rlhf.rollout.servers.member import NO_ANSWER, Member
from rlhf.rollout.servers.secret import Secret
from rlhf.rollout.servers.served_generation import ServedGeneration
from rlhf.rollout.servers.server_process import ServerProcess
from rlhf.rollout.vllm.requests import request_seed

log = logging.getLogger(__name__)
FleetState = Literal["ready", "weights", "done"]

TICK_S = 0.25  # interval in seconds between checks of the servers without other events


class ServersFailed(RuntimeError):
    """The rollout servers failed more often than rollout.servers.max_failures allows."""


class FleetLoop:
    """State of the fleet; only its event loop accesses the state.

    Args:
        processes: servers that this run starts, by log file. If empty, the servers are `settings.urls`. Servers of an
            earlier attempt that still run are reused. The caller ends the servers.
        request_settings: settings that all requests share.
        secret: sent to each server with every request.
        capacity: number of samples that a server decodes together; `Concurrency` adapts it to the reported load.
        open_session: opens the HTTP session.

    A `label` names weights: requests go only to servers with the wanted label, and answers with another label are
    rejected.
    """

    def __init__(
        self,
        settings: ServersConfig,
        processes: Mapping[Path, ServerProcess],
        request_settings: RequestSettings,
        secret: Secret,
        *,
        capacity: int,
        open_session: Callable[[], AbstractAsyncContextManager[aiohttp.ClientSession]] = open_session,
    ) -> None:
        self.closing = False
        self.error: BaseException | None = None  # an error that no restart of a server fixes
        self._settings, self.processes, self._capacity = settings, processes, capacity
        self._request_settings, self._open_session = request_settings, open_session
        self._secret = secret
        self._admission = Admission(secret, request_settings.adapter_rank, request_settings.longest)
        self._budget = Budget(settings.max_failures)
        self._members: list[Member] = []
        self._generation: ServedGeneration | None = None
        self._label, self._version = "", 0
        self._counts: Counter[str] = Counter()
        self._wake, self._news = asyncio.Event(), asyncio.Condition()

    async def run(self, began: Callable[[], None]) -> None:
        """Monitor the servers until `closing`; call `began` once the other methods are usable."""
        async with self._open_session() as self._session:
            now = _now()
            if self.processes:
                self._members = [self._member(i, now, "", *item) for i, item in enumerate(self.processes.items())]
            else:
                self._members = [self._member(i, now, url.rstrip("/")) for i, url in enumerate(self._settings.urls)]
            for member in self._members:
                if member.process is not None and member.process.adopt():
                    self._follow(member, "still runs and is used again")
                    member.health.probing(now)
            began()
            while not self.closing:
                for member in self._members:
                    self._advance(member, _now())
                self._dispatch()
                async with self._news:
                    self._news.notify_all()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), TICK_S)
                self._wake.clear()

    def _member(
        self, number: int, now: float, url: str, log: Path | None = None, process: ServerProcess | None = None
    ) -> Member:
        health = ServerHealth(self._settings, self._budget, ours=process is not None, now=now)
        return Member(number, health, self._client(url), url, Concurrency(self._capacity), process, log)

    def _client(self, url: str) -> ServerClient:
        return ServerClient(self._session, url, self._request_settings, self._settings.answer_timeout_s, self._secret)

    async def until(self, seconds: float, *, generating: bool) -> FleetState | None:
        """See `Fleet.wait`."""
        outcome_now = self._ended if generating else self._ready
        self._budget.needed = True
        end = _now() + seconds
        async with self._news:
            while (outcome := outcome_now()) is None and (left := end - _now()) > 0:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), left)
        if outcome in ("done", "ready"):  # after "weights", keep counting failures: a push may fail, too
            self._budget.needed = False
        return outcome

    def begin_push(self, label: str, version: int) -> dict[str, str]:
        """Set the label and version of the wanted weights. Return the last label of each server to push to, by URL.

        Such a server is alive and has other weights, or weights that this trainer has not verified yet. The fleet makes
        no other calls to the server until `end_push`.
        """
        self._label, self._version = label, version
        for member in self._members:
            member.health.expect_label(label)
        stale = [member for member in self._members if member.health.state == "stale"]
        for member in stale:
            member.pushing = True
            self._drop(member)
        return {member.url: member.health.label for member in stale}

    def end_push(self, label: str, errors: Mapping[str, str | None]) -> None:
        """Record the result of the push to the servers from `begin_push`, after which `label` names the wanted weights.

        Args:
            errors: by URL, None for success.
        """
        self._label = label
        for member in self._members:
            member.health.expect_label(label)
            if member.pushing:
                member.pushing = False
                error = errors.get(member.url, "the push skipped this server")
                member.health.pushed(_now(), label, error)
                if error is not None:
                    self._log_failure(member, f"the push of the weights failed: {error}")

    def begin(self, requests: Sequence[Request], seed: int, step: int, quotas: Sequence[Quota] = ()) -> None:
        """Start to generate. `until` waits for all samples or for the quotas, and `samples` returns the samples.

        After the quotas are reached, the servers continue the unfinished samples until `stop`.
        """
        self._generation = ServedGeneration(list(requests), quotas, seed, step)
        self._budget.needed = True
        self._wake.set()

    def samples(self) -> list[Sample]:
        """Return the sample of each request so far, in order."""
        assert self._generation is not None
        return self._generation.samples

    def pop_news(self) -> dict[int, Sample]:
        """Return the samples completed since the last call, by index of the request."""
        assert self._generation is not None
        return self._generation.pop_news()

    def extend(self, requests: Sequence[Request]) -> None:
        """Add requests to the generation."""
        assert self._generation is not None
        self._generation.extend(requests)
        self._wake.set()

    def stop(self) -> None:
        """Make the servers answer with the tokens so far.

        `until` waits for the answers, and `pop_samples` returns the samples.
        """
        assert self._generation is not None
        self._generation.stopping = True
        self._wake.set()

    def pop_samples(self) -> list[Sample]:
        """End the generation and return its samples, after `until` has returned `done`."""
        samples, self._generation = self.samples(), None
        return samples

    def metrics(self) -> dict[str, float]:
        counts, self._counts = self._counts, Counter()
        names = ("server_failures", "server_restarts", "requests_repeated", "requests_moved", "stale_answers")
        serving = sum(member.health.state == "serving" for member in self._members)
        return {"perf/servers_serving": float(serving)} | {f"perf/{name}": float(counts[name]) for name in names}

    def _ready(self) -> FleetState | None:
        self._check()
        return "ready" if any(m.health.state in ("stale", "serving") for m in self._members) else None

    def _ended(self) -> FleetState | None:
        assert self._generation is not None
        if self._generation.stopping:  # ignore failures: when a job ends, its servers end, too
            return None if any(member.tasks for member in self._members) else "done"
        self._check()
        if self._generation.complete:
            return "done"
        return "weights" if any(m.health.state == "stale" for m in self._members) else None

    def _check(self) -> None:
        if self.error is not None:
            raise self.error
        if self._budget.spent:
            servers = "\n".join(f"  {member.describe()}" for member in self._members)
            raise ServersFailed(
                f"The rollout servers failed {self._budget.in_a_row} times without a finished request between the "
                f"failures (rollout.servers.max_failures={self._budget.max_failures}):\n{servers}"
            )

    def _advance(self, member: Member, now: float) -> None:
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

    def _start(self, member: Member) -> None:
        process = member.process
        assert process is not None
        try:
            process.kill()
            process.start()
        except OSError as error:
            self._fail(member, f"could not be started: {error}", gone=True)
            return
        self._counts["server_restarts"] += bool(member.starts)
        self._follow(member, "restarted" if member.starts else "started")
        member.health.started(_now())

    def _follow(self, member: Member, how: str) -> None:
        assert member.process is not None
        member.url = member.process.url
        member.client = self._client(member.url)
        member.probe_error = NO_ANSWER
        member.starts += 1
        log.info("Rollout server %s: %s, log in %s.", member.url, how, member.log)

    async def _probe(self, member: Member) -> None:
        health, starting = member.health, member.health.state == "starting"
        with self._probing(member, may_fail=starting):
            if starting:
                await self._admission.check(member.client, member.url, ours=member.process is not None)
            label = await member.client.weight_label()
            failures = health.failures
            health.probed(_now(), label)
            if health.failures > failures:
                self._counts["server_failures"] += 1
                log.warning("Rollout server %s: %s.", member.url, health.reasons[-1])
            if starting:
                log.info("Rollout server %s is up, with the weights %r.", member.url, label)

    async def _count(self, member: Member) -> None:
        """Read the load of a busy server. An error is no failure; a missed deadline (`ServerHealth.overdue`) is."""
        with self._probing(member, may_fail=True):
            load = await member.client.load()
            member.health.counted(_now(), load.tokens)
            member.concurrency.reported(load)

    @contextmanager
    def _probing(self, member: Member, *, may_fail: bool) -> Iterator[None]:
        try:
            yield
            member.probe_error = ""
        except ServerFailure as failure:
            if member.process is None and member.probe_error == NO_ANSWER:
                log.warning(
                    "Rollout server %s (rollout.servers.urls): %s. Is it running? The run waits for at most "
                    "rollout.servers.start_timeout_s=%g seconds.",
                    member.url,
                    failure,
                    self._settings.start_timeout_s,
                )
            member.probe_error = str(failure)
            if not may_fail:
                self._fail(member, str(failure), gone=failure.hung)
        except Exception as error:
            self.error = error
        finally:
            member.probe = None
            self._wake.set()

    def _dispatch(self) -> None:
        """Send queued requests, each to the server with the most room. After `stop`, abort running requests instead."""
        generation = self._generation
        if generation is None:
            return
        if generation.stopping:
            for member in self._members:
                if member.tasks and member.abort is None:
                    member.abort = asyncio.create_task(self._abort(member))
            return
        serving = [member for member in self._members if member.health.state == "serving"]
        if not generation.queue:
            self._recall(generation, serving)
        while generation.queue and serving:
            member = max(serving, key=lambda member: member.concurrency.room)
            if member.concurrency.room <= 0:
                return
            index = generation.queue.pop(member.number)
            member.concurrency.sent()
            member.health.request_sent(_now())
            name = uuid.uuid4().hex
            member.tasks[asyncio.create_task(self._send(member, generation, index), name=name)] = index

    def _recall(self, generation: ServedGeneration, serving: Sequence[Member]) -> None:
        """Take back the youngest samples of servers on which samples wait, as many as other servers have room for."""
        for member in serving:
            others = [other.concurrency for other in serving if other is not member and other.concurrency.room > 0]
            room = sum(other.limit - other.in_flight for other in others)
            # Take back only this trainer's samples, because samples of another trainer may wait, too.
            count = min(member.concurrency.waiting, len(member.tasks), room)
            # vLLM starts samples in the order in which they came, so the youngest wait.
            youngest = list(member.tasks)[len(member.tasks) - count :]
            if youngest:
                generation.queue.put_back(member.number, [member.tasks.pop(task) for task in youngest])
                member.concurrency.recalled(len(youngest))
                self._counts["requests_moved"] += len(youngest)
            for task in youngest:
                member.health.request_recalled()
                task.cancel()

    async def _abort(self, member: Member) -> None:
        """Make the server end its requests and answer with the tokens so far."""
        try:
            await member.client.abort([task.get_name() for task in member.tasks])
            # The next call aborts requests that the server received after this call.
            await asyncio.sleep(TICK_S)
        except ServerFailure as failure:
            self._fail(member, str(failure), gone=failure.hung)
        except Exception as error:
            self.error = error
        finally:
            member.abort = None
            self._wake.set()

    async def _send(self, member: Member, generation: ServedGeneration, index: int) -> None:
        request, task = generation.requests[index], asyncio.current_task()
        assert task is not None
        try:
            seed = request_seed(generation.seed, generation.step, request)
            sample = await member.client.generate(request, seed, self._label, self._version, task.get_name())
            if sample.finish_reason == "partial" and not generation.stopping:
                raise ServerFailure("another client aborted a request")
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
            # After `_drop`, the task is no longer in `tasks` and the request is queued again: ignore this answer.
            if member.tasks.pop(task, None) is not None:
                generation.answered(index, sample)
                if sample.finish_reason == "partial":
                    member.concurrency.recalled(1)
                else:
                    member.concurrency.finished()
                member.health.request_finished(_now())
        finally:
            self._wake.set()

    def _fail(self, member: Member, reason: str, *, gone: bool = False) -> None:
        member.health.failed(_now(), reason, gone=gone)
        self._log_failure(member, reason)
        self._drop(member)
        if gone and member.process is not None:
            member.process.kill()

    def _log_failure(self, member: Member, reason: str) -> None:
        self._counts["server_failures"] += 1
        log.warning("Rollout server %s: %s. Next try in %g s.", member.url, reason, member.health.backoff_s)

    def _drop(self, member: Member) -> None:
        """Put the server's requests back at the head of the queue, and cancel its tasks."""
        tasks, member.tasks = member.tasks, {}
        member.concurrency.dropped()
        if self._generation is not None:
            self._counts["requests_repeated"] += len(tasks)
            self._generation.queue.put_back(member.number, tasks.values())
        for task in [*tasks, member.probe, member.abort]:
            if task is not None and task is not asyncio.current_task():
                task.cancel()


def _now() -> float:
    """Return the event loop's monotonic clock, which simulations replace."""
    return asyncio.get_running_loop().time()
