"""Simulates the schedules of other asynchronous trainers on the servers and constants of `benchmarks.async_run`.

Each class simplifies a trainer's schedule. It follows the trainer's description of August 2026, not its code:

- `Verl`: verl's fully asynchronous trainer with `staleness_threshold` 0.5, `partial_rollout` and a parameter sync after
  each 4 updates of a quarter of a batch. Whole groups start right after a sync, until one and a half batches are in
  flight or in the queue. Updates take complete groups in the order in which they complete. A sync aborts all samples,
  which continue afterwards.
- `PrimeRL`: the number of samples in flight equals the number of slots. A new sample starts when one ends, unless two
  batches wait for training or are trained on. Weights change under the running samples, which keep their KV cache.
  prime-rl drops groups that began more than 8 steps ago (`max_off_policy_steps`); here no group gets so old.

A token's age is the number of steps from the weights that drew the token to the weights that the step updates, as for
`rollout.async_steps`.
"""

import asyncio
from abc import ABC, abstractmethod
from collections import Counter, deque
from dataclasses import dataclass, field

from benchmarks.async_run import GROUP, PROMPT, SECONDS, SYNC_S, TOKENS, Measured, Workload, slot_seconds
from benchmarks.scripted_servers import ScriptedServer
from benchmarks.virtual_time import run_in_virtual_time

UPDATES, STALENESS = 4, 0.5
AHEAD, OFF_POLICY = 2, 8


@dataclass(eq=False)
class _Group:
    uid: int
    left: int = GROUP  # unfinished samples
    drawn: Counter[int] = field(default_factory=Counter)  # tokens by the version of the weights
    tasks: list[asyncio.Task] = field(default_factory=list)


class Policy(ABC):
    """Base class of both schedules: servers, groups in flight, complete groups, and measurements."""

    updates = 1  # optimizer updates per step

    def __init__(self, work: Workload, training_s: float) -> None:
        self.work, self.training_s, self.version, self.uid = work, training_s, 0, 0
        self.servers = [ScriptedServer(work.speed, lambda body: 0) for _ in range(work.servers)]
        self.samples = 0  # in flight
        self.on_server: Counter[int] = Counter()  # samples by server
        self.begun: dict[int, _Group] = {}  # by uid
        self.complete: deque[_Group] = deque()
        self.training = 0  # groups of the current update
        self.news = asyncio.Event()
        self.ages, self.trained = Counter[int](), list[tuple[int, int]]()

    def begin_group(self) -> _Group:
        group = self.begun[self.uid] = _Group(self.uid)
        self.uid += 1
        return group

    def begin_sample(self, group: _Group) -> None:
        self.samples += 1
        group.tasks.append(asyncio.create_task(self._sample(group, len(group.tasks))))

    async def _sample(self, group: _Group, number: int) -> None:
        await self.decode(group, number, self.work.length(group.uid, number))
        self.samples -= 1
        group.left -= 1
        if not group.left:
            del self.begun[group.uid]
            self.complete.append(group)
        self.sample_ended()
        self.news.set()

    async def on_least_loaded(self, key: tuple[int, ...], length: int, name: str) -> int:
        """Decode on the server with the fewest samples, and return the number of tokens."""
        server = min(range(len(self.servers)), key=self.on_server.__getitem__)
        self.on_server[server] += 1
        try:
            return await self.servers[server].decode(key, length, name)
        finally:
            self.on_server[server] -= 1

    @abstractmethod
    async def decode(self, group: _Group, number: int, length: int) -> None:
        """Decode all tokens of a sample, and count them in `group.drawn`."""

    def sample_ended(self) -> None:  # noqa: B027 - nothing to do by default
        """Use the slot that the sample has freed."""

    @abstractmethod
    def refill(self) -> None:
        """Start new samples after a sync."""

    @abstractmethod
    async def sync(self) -> None:
        """Send the next weights."""

    async def run(self) -> Measured:
        work, loop, start, ran = self.work, asyncio.get_running_loop(), 0.0, 0.0
        self.refill()
        for step in range(1, work.warmup + work.steps + 1):
            for _ in range(self.updates):
                for group in await self.batch(work.groups // self.updates):
                    self.trained += [(group.uid, sample) for sample in range(GROUP)]
                    if step > work.warmup:
                        self.ages.update({self.version - version: n for version, n in group.drawn.items()})
                await asyncio.sleep(self.training_s / self.updates)
            self.training = 0
            await self.sync()
            self.version += 1
            self.refill()
            if step == work.warmup:
                start, ran = loop.time(), slot_seconds(self.servers, loop.time())
        seconds = loop.time() - start
        live = (slot_seconds(self.servers, loop.time()) - ran) / (seconds * work.servers * work.slots)
        tasks = [task for group in self.begun.values() for task in group.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return Measured(seconds / work.steps, sum(self.ages.values()) / work.steps, self.ages, live, self.trained)

    async def batch(self, groups: int) -> list[_Group]:
        while len(self.complete) < groups:
            self.news.clear()
            await self.news.wait()
        self.training = groups
        return [self.complete.popleft() for _ in range(groups)]

    @staticmethod
    def context(uid: int, *sampled: int) -> tuple[int, ...]:
        """Return the key of a prompt, or of a response so far, in the prefix cache."""
        return (uid,) * (PROMPT // TOKENS) + sampled


class Verl(Policy):
    updates = UPDATES

    def __init__(self, work: Workload, training_s: float) -> None:
        super().__init__(work, training_s)
        self.parked: list[tuple[int, int, asyncio.Future]] = []  # aborted samples: uid, number, and a signal to go on

    def refill(self) -> None:
        while len(self.begun) + len(self.complete) < self.work.groups * (1 + STALENESS):
            group = self.begin_group()
            for _ in range(GROUP):
                self.begin_sample(group)

    async def decode(self, group: _Group, number: int, length: int) -> None:
        done = 0
        while done < length:
            key, version = self.context(group.uid, *(2 + number for _ in range(done))), self.version
            decoded = await self.on_least_loaded(key, length - done, f"{group.uid}.{number}")
            group.drawn[version] += decoded
            done += decoded
            if done < length:
                goes_on = asyncio.get_running_loop().create_future()
                self.parked.append((group.uid, number, goes_on))
                await goes_on

    async def sync(self) -> None:
        unfinished = {f"{group.uid}.{number}" for group in self.begun.values() for number in range(GROUP)}
        for server in self.servers:
            server.abort(unfinished)
        await asyncio.sleep(SYNC_S / SECONDS)
        for server in self.servers:
            server.load_weights(f"{self.version + 1}")
        parked, self.parked = sorted(self.parked, key=lambda each: each[:2]), []
        for _, _, goes_on in parked:
            goes_on.set_result(None)


class PrimeRL(Policy):
    def __init__(self, work: Workload, training_s: float) -> None:
        super().__init__(work, training_s)
        self.counted: Counter[str] = Counter()  # by name: tokens of an unfinished sample that `drawn` includes

    def refill(self) -> None:
        newest = next(reversed(self.begun.values()), None)
        while self.samples < self.work.servers * self.work.slots:
            if newest is None or len(newest.tasks) == GROUP:
                if len(self.complete) + self.training >= AHEAD * self.work.groups:
                    return
                newest = self.begin_group()
            self.begin_sample(newest)

    def sample_ended(self) -> None:
        self.refill()

    async def decode(self, group: _Group, number: int, length: int) -> None:
        name = f"{group.uid}.{number}"
        await self.on_least_loaded(self.context(group.uid), length, name)
        group.drawn[self.version] += length - self.counted.pop(name, 0)

    async def sync(self) -> None:
        for server in self.servers:
            server.hang()
            for name, decoded in server.progress().items():
                self.begun[int(name.partition(".")[0])].drawn[self.version] += decoded - self.counted[name]
                self.counted[name] = decoded
        await asyncio.sleep(SYNC_S / SECONDS)
        for server in self.servers:
            server.load_weights(f"{self.version + 1}")
            server.go_on()


def run_peer(policy: type[Policy], work: Workload, training_s: float) -> Measured:
    """Run all steps of `policy`; the training of each step takes `training_s` simulated seconds."""

    async def measured() -> Measured:
        return await policy(work, training_s).run()

    return run_in_virtual_time(measured())
