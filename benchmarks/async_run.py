"""Runs steps of `rollout.async_steps` on simulated servers, in virtual time.

Quotas, batches in flight, aborts, continued responses, weight labels, dispatch and HTTP client are the trainer's own
(`PartialRollouts`, `Generation`, `PolicySampler`, `ServerEngine`, `FleetLoop`). The servers, the weight sync and the
training are simulated: each only takes time. Rewards take no time.

To save time, one simulated token stands for `TOKENS` tokens, and one simulated second for `SECONDS` seconds.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import torch

from benchmarks.scripted_servers import ScriptedServer, ScriptedSession, ServerSpeed
from benchmarks.virtual_time import VirtualTimeLoop
from rlhf.config import OverlongBufferConfig
from rlhf.config.derived import staleness_bound
from rlhf.config.schema.rollout import ServersConfig
from rlhf.data import DrawnPrompt, Prompt
from rlhf.experience.generation import Generation
from rlhf.experience.groups import Group
from rlhf.experience.metrics import RolloutStats
from rlhf.experience.new_prompts import NewPrompts
from rlhf.experience.partial_rollouts import PartialRollouts
from rlhf.experience.policy_sampler import PolicySampler
from rlhf.experience.prompt_share import PromptShare
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.dims import RankGroup
from rlhf.ranks.transport import Transport
from rlhf.reward import Reward
from rlhf.rollout.engine import Quota, Request, SamplingParams
from rlhf.rollout.servers.client import RequestSettings
from rlhf.rollout.servers.fleet_loop import FleetLoop, FleetState
from rlhf.rollout.servers.secret import Secret
from rlhf.rollout.servers.server_engine import ServerEngine
from rlhf.rollout.servers.weights.push import Pushed
from rlhf.rollout.vllm.requests import request_seed

T = TypeVar("T")
TOKENS, SECONDS = 128, 16
GROUP, PROMPT, LONGEST = 8, 256, 20_480
SYNC_S = 5.0
"""Duration of a weight sync in seconds. No server generates during a sync."""


@dataclass
class Workload:
    """The work of all schedules: `groups` groups of 8 samples per step, on `servers` servers."""

    lengths: Iterator[int]
    """Response lengths in tokens."""
    servers: int = 4
    slots: int = 16
    groups: int = 32
    warmup: int = 5
    steps: int = 6
    """Number of measured steps. They follow `warmup` steps."""
    _drawn: list[int] = field(default_factory=list)

    def length(self, uid: int, sample: int) -> int:
        """Return the length of a response in simulated tokens."""
        while len(self._drawn) <= uid * GROUP + sample:
            self._drawn.append(math.ceil(next(self.lengths) / TOKENS))
        return self._drawn[uid * GROUP + sample]

    @property
    def speed(self) -> ServerSpeed:
        real, scale = ServerSpeed(slots=self.slots), TOKENS / SECONDS
        return ServerSpeed(
            slots=self.slots,
            base_s=real.base_s * scale,
            per_sample_s=real.per_sample_s * scale,
            prefill_s=real.prefill_s * scale,
        )

    def perfect_s(self, tokens: float) -> float:
        """Return the simulated seconds in which all slots decode `tokens` simulated tokens, without prefills."""
        step_s = self.speed.base_s + self.speed.per_sample_s * self.slots
        return tokens * step_s / (self.servers * self.slots)


@dataclass
class Measured:
    """Figures of the measured steps of one schedule."""

    seconds: float  # per step, simulated
    tokens: float  # trained per step, simulated
    ages: Counter[int]  # trained tokens by age in steps
    live: float  # mean fraction of the slots that decode a sample
    trained: list[tuple[int, int]]  # uid and number of the samples of all steps
    decoded: float = 0.0  # simulated tokens of all steps
    left_over: int = 0  # simulated tokens of the responses in flight at the end

    @property
    def steps_per_hour(self) -> float:
        return 3600 / (self.seconds * SECONDS)

    @property
    def age_mean(self) -> float:
        return sum(age * tokens for age, tokens in self.ages.items()) / sum(self.ages.values())

    @property
    def age_max(self) -> int:
        return max(self.ages)


def slot_seconds(servers: Sequence[ScriptedServer], end: float) -> float:
    """Return the integral over time, until `end`, of the number of slots that decode a sample."""
    return sum(server.running_until(end) for server in servers)


class VirtualFleet:
    """Replaces `Fleet`: runs the fleet's loop only while the trainer waits for the loop or trains, in virtual time."""

    def __init__(self, servers: Sequence[ScriptedServer], capacity: int) -> None:
        self.servers = {f"http://server{i}": server for i, server in enumerate(servers)}
        self._loop = VirtualTimeLoop()
        asyncio.set_event_loop(self._loop)
        began = asyncio.Event()
        self._fleet_loop = FleetLoop(
            ServersConfig(answer_timeout_s=60.0, max_failures=0, urls=list(self.servers)),
            {},
            RequestSettings([1], {}, 10),
            Secret("simulated-servers", ""),
            capacity=capacity,
            open_session=lambda: ScriptedSession(self.servers),  # type: ignore[arg-type, return-value]
        )
        self._task = self._loop.create_task(self._fleet_loop.run(began.set))
        self._loop.run_until_complete(began.wait())

    @property
    def now(self) -> float:
        return self._loop.time()

    def wait(self, seconds: float, *, generating: bool = True) -> FleetState | None:
        return self._loop.run_until_complete(self._fleet_loop.until(seconds, generating=generating))

    def do(self, action: Callable[[FleetLoop], T]) -> T:
        async def run() -> T:
            return action(self._fleet_loop)

        return self._loop.run_until_complete(run())

    def sleep(self, seconds: float) -> None:
        self._loop.run_until_complete(asyncio.sleep(seconds))

    def close(self) -> None:
        self._fleet_loop.closing = True
        self._task.cancel()
        others = asyncio.all_tasks(self._loop)
        for task in others:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*others, return_exceptions=True))
        asyncio.set_event_loop(None)
        self._loop.close()


class _Engine(ServerEngine):
    """Maps the seed of each request to the number of tokens that the request needs."""

    def __init__(self, work: Workload) -> None:
        self._work, self.left = work, dict[int, int]()
        servers = [ScriptedServer(work.speed, self._tokens_left) for _ in range(work.servers)]
        self.fleet, resources = VirtualFleet(servers, work.slots), ExitStack()
        resources.callback(self.fleet.close)
        push: Any = SimpleNamespace(send=self._send, sent_bytes=0)
        super().__init__(Coordinator(Transport()), cast(Any, self.fleet), push, resources, torch.float32, {}, "run")
        self.wait_until_ready()

    def begin(self, requests: Sequence[Request], quotas: Sequence[Quota] = (), *, seed: int, step: int) -> None:
        self.left = {
            request_seed(seed, step, each): self._work.length(each.uid, each.sample) - each.start for each in requests
        }
        super().begin(requests, quotas, seed=seed, step=step)

    def _tokens_left(self, body: dict[str, Any]) -> int:
        return self.left[body["sampling_params"]["seed"]]

    def _send(self, urls: Sequence[str], tensors: Iterator[Any], name: str) -> Pushed:
        list(tensors)
        self.fleet.sleep(SYNC_S / SECONDS)
        for url in urls:
            self.fleet.servers[url].load_weights(name)
        return Pushed(name, dict.fromkeys(urls))


class _Stream:
    """Draws prompts endlessly. Every token of a prompt is the prompt's uid."""

    def __init__(self) -> None:
        self._drawn = 0

    def next(self, count: int) -> list[DrawnPrompt]:
        first, self._drawn = self._drawn, self._drawn + count
        tokens = PROMPT // TOKENS
        return [DrawnPrompt(uid, Prompt(uid, [], [uid] * tokens, "", "", {})) for uid in range(first, self._drawn)]


def source_of(
    engine: ServerEngine, groups: int, async_steps: int, max_staleness: int | None
) -> NewPrompts | PartialRollouts:
    """Return the trainer's source of groups."""
    coordinator, nothing = Coordinator(Transport()), SimpleNamespace(full_tensors=lambda dtype: iter(()))
    generation = Generation(
        sampler=PolicySampler(engine, cast(Any, nothing), seed=1, background=True),
        params=SamplingParams(max_tokens=LONGEST // TOKENS),
        n=GROUP,
        greedy_baseline=False,
        reward=Reward([]),
        overlong_buffer=OverlongBufferConfig(),
        tokenizer=cast(Any, SimpleNamespace(decode=lambda token_ids, skip_special_tokens: "")),
        coordinator=coordinator,
        batch_size=groups,
    )
    prompts = PromptShare(cast(Any, _Stream()), groups, RankGroup(0, range(1), None))
    if not async_steps:
        return NewPrompts(prompts, generation)
    return PartialRollouts(prompts, generation, async_steps, staleness_bound(async_steps, max_staleness))


def run(work: Workload, async_steps: int, training_s: float, max_staleness: int | None = None) -> Measured:
    """Run the steps with `training_s` simulated seconds of training each."""
    engine = _Engine(work)
    try:
        source, fleet = source_of(engine, work.groups, async_steps, max_staleness), engine.fleet
        servers = list(fleet.servers.values())
        ages, trained, start, ran = Counter[int](), list[tuple[int, int]](), 0.0, 0.0
        for step in range(1, work.warmup + work.steps + 1):
            stats = RolloutStats()
            groups = source.groups(None, stats, step)
            source.begin(stats, step)
            fleet.sleep(training_s)
            trained += [(sample.uid, sample.sample) for group in groups for sample in group.samples]
            if step > work.warmup:
                ages += token_ages(groups, version=step - 1)
            elif step == work.warmup:
                start, ran = fleet.now, slot_seconds(servers, fleet.now)
        seconds = fleet.now - start
        live = (slot_seconds(servers, fleet.now) - ran) / (seconds * work.servers * work.slots)
        tokens, in_flight = sum(ages.values()) / work.steps, left_over(source)
        decoded = sum(server.tokens for server in servers)
        return Measured(seconds / work.steps, tokens, ages, live, trained, decoded, in_flight)
    finally:
        engine.close()


def left_over(source: NewPrompts | PartialRollouts) -> int:
    """End the background generation, and return the number of tokens in flight."""
    source.tensors()
    begun = source.begun if isinstance(source, PartialRollouts) else []
    return sum(len(sample) for each in begun for sample in each.samples)


def token_ages(groups: Sequence[Group], version: int) -> Counter[int]:
    """Return the number of tokens of `groups` by age, for training by the policy after `version` steps."""
    ages = Counter[int]()
    for sample in (sample for group in groups for sample in group.samples):
        start = 0
        for drawn_by, end in sample.versions:
            ages[version - drawn_by] += end - start
            start = end
    return ages
