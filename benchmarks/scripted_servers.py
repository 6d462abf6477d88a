"""Simulates vLLM servers in virtual time behind the HTTP session of the real client.

The client, the fleet's loop and the dispatch are the trainer's own; only the network, the servers and the clock are
simulated. A server decodes one token of each running sample per engine step. An engine step lasts `base_s` plus
`per_sample_s` for each running sample. If the KV cache is full, the server preempts its youngest sample as vLLM does:
the sample waits, and its tokens are prefilled again. Prefills delay all samples of the server.
"""

import asyncio
import heapq
import json
from collections import deque
from collections.abc import AsyncIterator, Callable, Container, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp

from benchmarks.virtual_time import run_in_virtual_time
from rlhf.config.schema.rollout import ServersConfig
from rlhf.rollout.engine import Request
from rlhf.rollout.sample import Sample
from rlhf.rollout.servers.client import ENGINE_ID, RequestSettings
from rlhf.rollout.servers.fleet_loop import FleetLoop
from rlhf.rollout.servers.secret import Secret

VERSION = {"version": "0.32.0"}
LABEL = "w1"


@dataclass(frozen=True)
class ServerSpeed:
    """Constants of a simulated server."""

    slots: int = 64  # vLLM's max_num_seqs
    cache_tokens: int = 10**9
    base_s: float = 0.02
    per_sample_s: float = 2e-4
    prefill_s: float = 1e-5  # per token of a prompt that is not in the prefix cache


@dataclass(eq=False)
class _Job:
    cached: float  # tokens in the KV cache when the job is admitted
    left: float  # tokens to decode
    length: int
    name: str
    done: asyncio.Future  # number of decoded tokens
    begun: float = 0.0  # number of the engine step at which the job was admitted


@dataclass
class ScriptedServer:
    """One simulated server. `length_of` gives the response length from the body of a request."""

    speed: ServerSpeed
    length_of: Callable[[dict[str, Any]], int]
    label: str = LABEL
    hangs: bool = False
    down: bool = False
    preempted: int = 0
    tokens: float = 0.0
    prefills: int = 0
    last_arrival: float = 0.0
    history: list[tuple[float, int]] = field(default_factory=lambda: [(0.0, 0)])  # times and running samples
    running: list[tuple[float, int, _Job]] = field(default_factory=list)  # heap by the engine step of a sample's end
    waiting: deque[_Job] = field(default_factory=deque)
    _step: float = 0.0  # engine steps so far
    _since: float = 0.0
    _stall_s: float = 0.0  # seconds of prefill that delay decoding
    _prompts: set[tuple[int, ...]] = field(default_factory=set)
    _timer: asyncio.TimerHandle | None = None
    _number: int = 0

    async def generate(self, body: dict[str, Any]) -> bytes:
        length, seed = self.length_of(body), body["sampling_params"]["seed"]
        tokens = await self.decode(tuple(body["token_ids"]), length, body["request_id"])
        # Give each sample of a prompt other tokens, so that the prefix cache can distinguish their responses.
        return answer(tokens, self.label, token=2 + seed % 8, aborted=tokens < length)

    async def decode(self, key: tuple[int, ...], length: int, name: str) -> int:
        """Prefill the context `key`, decode, and return the number of tokens: `length`, or less after `abort`."""
        self._advance()
        if key not in self._prompts:
            self._prompts.add(key)
            self.prefills += 1
            self._stall_s += self.speed.prefill_s * len(key)
        loop = asyncio.get_running_loop()
        job, self.last_arrival = _Job(len(key), length, length, name, loop.create_future()), loop.time()
        self.waiting.append(job)
        self._schedule()
        try:
            return await job.done
        except asyncio.CancelledError:
            self._advance()
            self._remove([job])
            raise

    def abort(self, names: Container[str]) -> None:
        """End the requests `names`; each returns the tokens decoded so far."""
        self._advance()
        aborted = [job for job in self._jobs() if job.name in names and not job.done.done()]
        for job in aborted:
            job.done.set_result(self._decoded(job))
        self._remove(aborted)

    def progress(self) -> dict[str, int]:
        """Return the number of decoded tokens of each request."""
        self._advance()
        return {job.name: self._decoded(job) for job in self._jobs()}

    def load_weights(self, label: str) -> None:
        """Load new weights, for which the prefix cache is not valid."""
        self.label, self._prompts = label, set()

    def hang(self) -> None:
        self._advance()
        self.hangs = True

    def go_on(self) -> None:
        self._advance()
        self.hangs = False
        self._schedule()

    def die(self) -> None:
        self._advance()
        self.down = True
        for job in self._jobs():
            if not job.done.done():
                job.done.set_exception(aiohttp.ServerDisconnectedError())
        self.running, self.waiting = [], deque()
        self._schedule()

    def restart(self) -> None:
        self.down, self.label, self.tokens, self._prompts = False, "default", 0.0, set()

    def running_until(self, end: float) -> float:
        """Return the integral of running samples over virtual time from 0 to `end`."""
        times = [*self.history, (max(end, self.history[-1][0]), 0)]
        return sum(n * max(0.0, min(after, end) - min(time, end)) for (time, n), (after, _) in pairwise(times))

    def metrics(self) -> str:
        self._advance()
        return (
            f"vllm:generation_tokens_total{{}} {self.tokens}\nvllm:num_requests_running{{}} {len(self.running)}\n"
            f"vllm:num_requests_waiting{{}} {len(self.waiting)}\n"
        )

    def _jobs(self) -> list[_Job]:
        return [*(job for _, _, job in self.running), *self.waiting]

    def _decoded(self, job: _Job) -> int:
        """Return the number of decoded tokens of an unfinished job."""
        runs = any(entry[2] is job for entry in self.running)
        left = job.left - (self._step - job.begun if runs else 0.0)
        return max(0, min(int(job.length - left + 1e-6), job.length - 1))

    def _remove(self, jobs: Container[_Job]) -> None:
        self.running = [entry for entry in self.running if entry[2] not in jobs]
        heapq.heapify(self.running)
        self.waiting = deque(job for job in self.waiting if job not in jobs)
        self._schedule()

    def _used(self) -> float:
        return sum(job.cached + self._step - job.begun for _, _, job in self.running)

    def _advance(self) -> None:
        """Decode up to now."""
        now = asyncio.get_running_loop().time()
        if self.running and not self.hangs:
            stalled = min(self._stall_s, now - self._since)
            self._stall_s -= stalled
            steps = (now - self._since - stalled) / self._step_s
            self._step += steps
            self.tokens += steps * len(self.running)
        self._since = now
        while self.running and self.running[0][0] <= self._step + 1e-6:
            job = heapq.heappop(self.running)[2]
            if not job.done.done():
                job.done.set_result(job.length)

    @property
    def _step_s(self) -> float:
        return self.speed.base_s + self.speed.per_sample_s * len(self.running)

    def _schedule(self) -> None:
        """Preempt and admit samples, and set a timer for the next end of a sample, or for a full cache."""
        if self._timer is not None:
            self._timer.cancel()
        used, limit = self._used(), self.speed.cache_tokens
        while len(self.running) > 1 and used >= limit:
            youngest = max(self.running, key=lambda entry: entry[1])
            self.running.remove(youngest)
            heapq.heapify(self.running)
            job = youngest[2]
            job.cached, job.left = job.cached + self._step - job.begun, job.left - (self._step - job.begun)
            self._stall_s += self.speed.prefill_s * job.cached
            self.waiting.appendleft(job)
            used -= job.cached
            self.preempted += 1
        while self.waiting and len(self.running) < self.speed.slots and used + self.waiting[0].cached < limit:
            job = self.waiting.popleft()
            job.begun, self._number = self._step, self._number + 1
            heapq.heappush(self.running, (self._step + job.left, self._number, job))
            used += job.cached
        self.history.append((self._since, len(self.running)))
        if self.running and not self.hangs:
            steps = self.running[0][0] - self._step
            if len(self.running) > 1:
                steps = min(steps, max(1.0, (limit - used) / len(self.running)))
            seconds = max(self._stall_s + steps * self._step_s, 1e-9)
            self._timer = asyncio.get_running_loop().call_later(seconds, self._tick)

    def _tick(self) -> None:
        self._advance()
        self._schedule()


def answer(length: int, label: str, *, token: int = 4, aborted: bool = False) -> bytes:
    """Return vLLM's answer with one sample of `length` tokens."""
    content, reason = ", ".join([f'{{"token_id": {token}, "logprob": -0.5}}'] * length), "abort" if aborted else "stop"
    choice = (
        f'{{"index": 0, "token_ids": {[token] * length}, "finish_reason": "{reason}", '
        f'"logprobs": {{"content": [{content}]}}, '
        f'"weight_versions": [{{"version": "{label}", "start": 0, "end": {length}}}]}}'
    )
    return f'{{"choices": [{choice}]}}'.encode()


@dataclass
class _Response:
    content: bytes
    status: int = 200

    async def read(self) -> bytes:
        return self.content


class ScriptedSession:
    """Answers the client's HTTP requests from simulated servers, by URL."""

    def __init__(self, servers: dict[str, ScriptedServer]) -> None:
        self.servers = servers

    async def __aenter__(self) -> "ScriptedSession":
        return self

    async def __aexit__(self, *error: object) -> None:
        return None

    @asynccontextmanager
    async def request(
        self, method: str, url: str, *, json: Any = None, headers: Any = None, **_: Any
    ) -> AsyncIterator[_Response]:
        base, path = next((base, url.removeprefix(base)) for base in self.servers if url.startswith(base + "/"))
        server = self.servers[base]
        if server.down:
            raise aiohttp.ClientConnectionError("down")
        if not headers:  # without the secret
            yield _Response(b"", 401)
        elif path == "/inference/v1/generate":
            yield _Response(await server.generate(json))
        elif path == "/abort_requests":
            server.abort({name.removeprefix(ENGINE_ID) for name in json["request_ids"]})
            yield _Response(b"{}")
        elif path == "/metrics":
            yield _Response(server.metrics().encode())
        else:
            answers = {"/version": VERSION, "/weight_info": {"weight_version": server.label}}
            yield _Response(_dumps(answers.get(path, {})))


@dataclass(frozen=True)
class Generated:
    samples: list[Sample]
    seconds: float  # virtual
    metrics: dict[str, float]


def generate(
    servers: Sequence[ScriptedServer],
    requests: Sequence[Request],
    *,
    capacity: int,
    answer_timeout_s: float = 60.0,
    max_failures: int = 0,
    at: Sequence[tuple[float, Callable[[], None]]] = (),
) -> Generated:
    """Generate with the real client and fleet loop. `at`: virtual times, and what happens to a server then."""
    by_url = {f"http://server{i}": server for i, server in enumerate(servers)}
    settings = ServersConfig(answer_timeout_s=answer_timeout_s, max_failures=max_failures, urls=list(by_url))

    def push(fleet_loop: FleetLoop) -> None:
        urls = fleet_loop.begin_push(LABEL, 1)
        for url in urls:
            by_url[url].label = LABEL
        fleet_loop.end_push(LABEL, dict.fromkeys(urls))

    async def run() -> Generated:
        clock, began = asyncio.get_running_loop(), asyncio.Event()
        fleet_loop = FleetLoop(
            settings,
            {},
            RequestSettings([1], {}, 10),
            Secret("simulated-servers", ""),
            capacity=capacity,
            open_session=lambda: ScriptedSession(by_url),  # type: ignore[arg-type, return-value]
        )
        task = asyncio.create_task(fleet_loop.run(began.set))
        await began.wait()
        assert await fleet_loop.until(60.0, generating=False) == "ready"
        push(fleet_loop)
        for seconds, event in at:
            clock.call_at(seconds, event)
        start = clock.time()
        fleet_loop.begin(requests, seed=1, step=1)
        try:
            while (state := await fleet_loop.until(1000.0, generating=True)) != "done":
                if state == "weights":
                    push(fleet_loop)
            return Generated(fleet_loop.pop_samples(), clock.time() - start, fleet_loop.metrics())
        finally:
            fleet_loop.closing = True
            await task

    return run_in_virtual_time(run())


def _dumps(value: Any) -> bytes:
    return json.dumps(value).encode()
