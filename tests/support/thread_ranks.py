"""Runs ranks as threads of one process, which start in microseconds, for tests of agreement between ranks.

Messages have the encoding, the deadlines and the errors of real ranks. Arguments and results are pickled. The
threads share the state of a process: random generators, limits, the environment, a test's patches. A rank cannot die in
the middle of a line.
Tests that depend on separate processes use `checkpoints.run_ranks`.
"""

import logging
import os
import pickle
import threading
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import reduce
from operator import or_
from typing import Any, NoReturn

import pytest
from torch import Tensor

from rlhf import events
from rlhf.events import Listener
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.gloo import GlooTransport
from rlhf.ranks.object_codec import decode, encode
from rlhf.ranks.rng import rng_state, set_rng_state
from rlhf.ranks.transport import LostPeer

TIMEOUT = timedelta(seconds=60)
DEADLINE_S = 90.0
# Threads that a rank leaves running at its end, such as deletions, end soon after.
LINGER_S = 30.0


class RankDied(BaseException):
    """Ends a dead rank: raised in each of its threads at the thread's next call."""


class _World:
    """Shared state of a run's ranks: messages sent but not received, and dead ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.dead: set[int] = set()
        self.groups = [0] * size
        """Number of groups that each rank has joined; all ranks join the same groups in the same order."""
        self.calls: defaultdict[tuple[int, int], dict[int, tuple[str, bytes]]] = defaultdict(dict)
        """Messages by group and call, then by rank."""
        self.passed: defaultdict[int, list[int]] = defaultdict(lambda: [0] * size)
        """Number of calls that each rank has finished, by group."""
        self.blocks: defaultdict[tuple[int, int, int], deque[Tensor]] = defaultdict(deque)
        """Tensors by group, sender and receiver."""

    def join(self, rank: int, timeout: timedelta) -> "ThreadTransport":
        with self.changed:
            group = self.groups[rank]
            self.groups[rank] += 1
        return ThreadTransport(self, rank, group, timeout)

    def end(self, ranks: Collection[int]) -> None:
        with self.changed:
            self.dead.update(ranks)
            self.changed.notify_all()


class ThreadTransport:
    """Transports messages between threads of one process."""

    def __init__(self, world: _World, rank: int, group: int, timeout: timedelta) -> None:
        self.rank, self.world_size = rank, world.size
        self._world, self._group, self._timeout = world, group, timeout
        self._call = 0
        self._meet("group", b"", range(world.size))

    def duplicate(self, timeout: timedelta) -> "ThreadTransport":
        return self._world.join(self.rank, timeout)

    def all_gather(self, value: Any) -> list[Any]:
        if self.world_size == 1:
            return [value]
        return list(map(decode, self._meet("all_gather", encode(value), range(self.world_size))))

    def gather(self, value: Any, to: int) -> list[Any] | None:
        if self.world_size == 1:
            return [value]
        received = self._meet("gather", encode(value), range(self.world_size) if self.rank == to else [])
        return list(map(decode, received)) if self.rank == to else None

    def bitwise_or(self, bits: bytes) -> bytes:
        held = self._meet("bitwise_or", bits, range(self.world_size))
        assert len({len(each) for each in held}) == 1
        return bytes(reduce(or_, column) for column in zip(*held, strict=True))

    def send_object(self, value: Any, source: int, to: Sequence[int]) -> Any:
        takes = self.rank in to and self.rank != source and self.world_size > 1
        message = encode(value) if self.rank == source and self.world_size > 1 else b""
        received = self._meet("send_object", message, [source] if takes else [])
        return decode(received[0]) if takes else value if self.rank == source else None

    def broadcast(self, value: Any, source: int) -> Any:
        message = encode(value) if self.rank == source and self.world_size > 1 else b""
        [received] = self._meet("broadcast", message, [source])
        return value if self.rank == source else decode(received)

    def send(self, block: Tensor, to: int) -> None:
        with self._world.changed:
            self._raise_if_dead()
            self._world.blocks[self._group, self.rank, to].append(block.clone())
            self._world.changed.notify_all()

    def receive(self, block: Tensor, source: int) -> None:
        sent = self._world.blocks[self._group, source, self.rank]
        with self._world.changed:
            self._wait_for(lambda: [] if sent else [source])
            received = sent.popleft()
        assert (received.dtype, received.shape) == (block.dtype, block.shape)
        block.copy_(received)

    def exchange(self, block: Tensor, to: int, received: Tensor, source: int) -> None:
        self.send(block, to)
        self.receive(received, source)

    def _meet(self, kind: str, message: bytes, sources: Collection[int]) -> list[bytes]:
        """Send a message in this call, wait for the messages of the ranks `sources`, and return them."""
        world, number = self._world, self._call
        self._call += 1
        with world.changed:
            self._raise_if_dead()
            here = world.calls[self._group, number]
            here[self.rank] = kind, message
            world.changed.notify_all()
            self._wait_for(lambda: [rank for rank in sources if rank not in here])
            kinds = {rank: kind for rank, (kind, _) in sorted(here.items())}
            assert len(set(kinds.values())) == 1, f"the ranks make different calls: {kinds}"
            world.passed[self._group][self.rank] = number + 1
            if min(world.passed[self._group]) > number:
                del world.calls[self._group, number]
        return [here[rank][1] for rank in sources]

    def _wait_for(self, missing: Callable[[], Collection[int]]) -> None:
        """Wait until no rank is `missing`. Raises LostPeer if a missing rank is dead or exceeds the deadline."""
        end = time.monotonic() + self._timeout.total_seconds()
        while ranks := missing():
            self._raise_if_dead()
            left = end - time.monotonic()
            if left <= 0 or self._world.dead.intersection(ranks):
                raise LostPeer(f"a rank is gone, or did not answer in time: {sorted(ranks)}, {self._timeout}")
            self._world.changed.wait(left)
        self._raise_if_dead()

    def _raise_if_dead(self) -> None:
        if self.rank in self._world.dead:
            raise RankDied


class _Rank:
    """One rank of a world, visible to every thread that the rank starts."""

    def __init__(self, world: _World, number: int) -> None:
        self.world, self.number = world, number
        self.threads: list[threading.Thread] = []


def _here() -> _Rank | None:
    return getattr(threading.current_thread(), "test_rank", None)


def this_rank() -> int | None:
    """Return the rank of the current thread, or None in a process of one rank."""
    here = _here()
    return None if here is None else here.number


def in_front() -> bool:
    """Return whether this is a rank's main thread, not a thread that the rank started."""
    thread = threading.current_thread()
    return isinstance(thread, _RankThread) or thread is threading.main_thread()


def make_coordinator() -> Coordinator:
    """Return this rank's coordinator, over threads in a thread and over gloo in a process. Collective."""
    here = _here()
    return Coordinator(GlooTransport()) if here is None else Coordinator(here.world.join(here.number, TIMEOUT))


def subscribe(listener: Listener) -> None:
    """Call `listener` at every later event of this rank, in all its threads, until the rank ends."""
    mine = this_rank()
    events.subscribe(lambda event: listener(event) if this_rank() == mine else None)


def messages(level: int = logging.INFO) -> list[str]:
    """Collect this rank's log messages from now on until the rank ends."""
    mine, logged = this_rank(), list[str]()
    handler = logging.Handler(level)
    handler.addFilter(lambda record: this_rank() == mine)
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("rlhf").addHandler(handler)
    return logged


@contextmanager
def replaced(owner: Any, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Replace `owner.name` by `replacement` for this rank only. One rank at a time may replace a name."""
    mine, original = this_rank(), getattr(owner, name)

    def either(*arguments: Any, **named: Any) -> Any:
        return (replacement if this_rank() == mine else original)(*arguments, **named)

    setattr(owner, name, either)
    try:
        yield
    finally:
        setattr(owner, name, original)


def die() -> NoReturn:
    """End this rank at once without notice to its peers."""
    here = _here()
    if here is None:
        os._exit(9)
    here.world.end([here.number])
    raise RankDied


class _RankThread(threading.Thread):
    """Runs `function` as one rank. `outcome` is the pickled pair of an error's traceback and the result."""

    def __init__(self, rank: _Rank, function: Callable[..., Any], arguments: bytes) -> None:
        super().__init__(name=f"rank {rank.number}", daemon=True)
        self.test_rank, self._function, self._arguments = rank, function, arguments
        self.outcome: bytes | None = None

    def run(self) -> None:
        outcome: tuple[str | None, Any]
        try:
            outcome = None, self._function(self.test_rank.number, *pickle.loads(self._arguments))
            self.outcome = pickle.dumps(outcome)
        except RankDied:
            self.outcome = pickle.dumps((None, "died"))
        except BaseException:
            self.outcome = pickle.dumps((traceback.format_exc(), None))
        with self.test_rank.world.changed:
            self.test_rank.world.changed.notify_all()


@contextmanager
def _as_of_processes() -> Iterator[None]:
    """Undo ranks' changes of the process, and assign each new thread to the rank that starts it."""
    log, start = logging.getLogger("rlhf"), threading.Thread.start
    listeners, handlers, generators = list(events._listeners), list(log.handlers), rng_state()

    def start_as_the_same_rank(thread: threading.Thread) -> None:
        if (here := _here()) is not None:
            thread.test_rank = here  # type: ignore[attr-defined]
            here.threads.append(thread)
        start(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_as_the_same_rank)
        try:
            yield
        finally:
            events._listeners[:], log.handlers[:] = listeners, handlers
            set_rng_state(generators)


def run_thread_ranks(
    world_size: int, function: Callable[..., Any], *arguments: Any, deadline_s: float = DEADLINE_S
) -> list[Any]:
    """Run `function(rank, *arguments)` in `world_size` threads; return each result, or "died" after `die`.

    Fails if a rank raises, exceeds `deadline_s` or leaves a thread running.
    """
    world = _World(world_size)
    ranks = [_Rank(world, number) for number in range(world_size)]
    with _as_of_processes():
        threads = [_RankThread(rank, function, pickle.dumps(arguments)) for rank in ranks]
        for thread in threads:
            thread.start()
        try:
            _wait_for_all(world, threads, deadline_s)
        finally:
            world.end(range(world_size))
            for thread in threads:
                thread.join(LINGER_S)
        end = time.monotonic() + LINGER_S
        for thread in [thread for rank in ranks for thread in rank.threads]:
            thread.join(max(0.0, end - time.monotonic()))
            assert not thread.is_alive(), f"a rank has left {thread.name} running"
    return [pickle.loads(thread.outcome)[1] for thread in threads if thread.outcome is not None]


def _wait_for_all(world: _World, threads: Sequence[_RankThread], deadline_s: float) -> None:
    """Wait for all threads, and raise if a thread fails."""
    end, left = time.monotonic() + deadline_s, list(threads)
    with world.changed:
        while left:
            for thread in [thread for thread in left if thread.outcome is not None]:
                left.remove(thread)
                error, _ = pickle.loads(thread.outcome or b"")
                assert error is None, f"{thread.name}:\n{error}"
            ranks = {thread.test_rank.number for thread in left}
            seconds = end - time.monotonic()
            assert not ranks or seconds > 0, f"ranks {ranks} are still there after {deadline_s} s"
            if left:
                world.changed.wait(seconds)
