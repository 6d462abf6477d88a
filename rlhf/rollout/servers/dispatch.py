"""Decides which sample a server generates next, and how many samples it generates at once. No I/O, no clock."""

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

GROWTH = 8
"""A limit grows by 1/GROWTH of its value. A lowered limit is 1/GROWTH above the number of running samples. Each
difference is at least one sample."""


@dataclass(frozen=True)
class ServerLoad:
    """Load that a server reports: its tokens (prompt and response) since its start, and its present sample counts."""

    tokens: float
    running: int
    waiting: int


class Concurrency:
    """Limits the samples in flight on one server by the load that the server reports.

    - If samples wait on the server in two reports in a row, the limit falls to the running samples plus a small queue.
      The queue refills the server's slots without a round trip. A longer queue would keep samples from free slots on
      other servers.
    - The limit grows if no sample waits, and if as many samples as the limit have finished while the server was full.

    A preemption does not lower the limit, because vLLM preempts its youngest sample, which is cheap to compute again.
    In simulations with a too small KV cache, lower limits after preemptions cost 6 to 25 % of the tokens per second.

    Args:
        start: the first limit, normally the number of samples that the server decodes together.
    """

    def __init__(self, start: int) -> None:
        self.limit, self.in_flight = start, 0
        self.waiting = 0  # samples that wait on the server; 0 unless samples waited in both of the last two reports
        self._waited = False
        self._turned_over = 0  # samples finished while the server was full, since the limit changed

    @property
    def room(self) -> float:
        """Free fraction of the limit; 0 or less if the limit is reached."""
        return 1 - self.in_flight / self.limit

    def sent(self) -> None:
        self.in_flight += 1

    def finished(self) -> None:
        self._turned_over += self.in_flight >= self.limit
        self.in_flight -= 1

    def reported(self, load: ServerLoad) -> None:
        waits, waited, self._waited = load.waiting > 0, self._waited, load.waiting > 0
        self.waiting = load.waiting if waited else 0
        if waits and waited:
            self._set(min(self.limit, load.running + max(1, load.running // GROWTH)))
        elif not waits and self._turned_over >= self.limit:
            self._set(self.limit + max(1, self.limit // GROWTH))

    def recalled(self, samples: int) -> None:
        """Record that the trainer took waiting samples back from the server."""
        self.in_flight, self.waiting = self.in_flight - samples, 0

    def dropped(self) -> None:
        """Record that the server lost all its requests. The limit stays."""
        self.in_flight, self.waiting, self._waited, self._turned_over = 0, 0, False, 0

    def _set(self, limit: int) -> None:
        if limit != self.limit:
            self.limit, self._turned_over = limit, 0


class SampleQueue:
    """Samples of a generation that no server generates yet, by index.

    Siblings (samples of one prompt) go to the server that got their first sample, so that this server prefills the
    prompt only once. Other servers receive siblings only after every prompt has been sent to a server.
    """

    def __init__(self, groups: Iterable[Sequence[int]]) -> None:
        self._groups = deque[deque[int]]()
        self._group_of: dict[int, int] = {}
        self._left: dict[Hashable, deque[int]] = {}  # by server: siblings of samples that the server got
        self._number = 0
        self.extend(groups)

    def extend(self, groups: Iterable[Sequence[int]]) -> None:
        """Append groups of siblings."""
        for group in groups:
            self._group_of |= dict.fromkeys(group, self._number)
            self._groups.append(deque(group))
            self._number += 1

    def __bool__(self) -> bool:
        return bool(self._groups or self._left)

    def pop(self, server: Hashable) -> int:
        """Return the index of the sample that `server` should generate next, and remove the sample from the queue."""
        if server not in self._left and self._groups:
            self._left[server] = self._groups.popleft()
        if server in self._left:
            source, index = server, self._left[server].popleft()
        else:
            source = max(self._left, key=lambda other: len(self._left[other]))
            index = self._left[source].pop()
        if not self._left[source]:
            del self._left[source]
        return index

    def put_back(self, server: Hashable, indices: Iterable[int]) -> None:
        """Put the samples `indices` that `server` lost, and siblings that wait for `server`, at the queue's head."""
        by_group: dict[int, deque[int]] = {}
        for index in sorted([*indices, *self._left.pop(server, ())]):
            by_group.setdefault(self._group_of[index], deque()).append(index)
        self._groups.extendleft(by_group[number] for number in sorted(by_group, reverse=True))
