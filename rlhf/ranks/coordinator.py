"""Lets one rank, the leader, act on the run directory, and returns its result or raises its error on every rank.

If nodes have disks of their own, each storage domain has a leader. A `Transport` sends the objects between ranks.
Imports no torch.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from rlhf.ranks.object_codec import sendable
from rlhf.ranks.transport import Transport

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
U = TypeVar("U")


class PeerError(RuntimeError):
    """Names the rank on which an error happened."""


class Coordinator:
    """Makes collective calls over Python objects. Every rank must make the same calls in the same order.

    `all_gather`, `broadcast`, `bitwise_or`, `send`, `receive` and `exchange` are as in `Transport`.

    If a function raises on a rank, the call raises on every rank. Every call raises LostPeer if a rank is dead or does
    not answer in time. `domains` is each rank's storage domain: the lowest rank that sees the same run directory.
    """

    def __init__(self, transport: Transport, domains: Sequence[int] | None = None) -> None:
        self._transport = transport
        self.rank, self.world_size = self._transport.rank, self._transport.world_size
        self.domains = list(domains or [0] * self.world_size)

    def duplicate(self, timeout: timedelta) -> "Coordinator":
        """Return a coordinator of the same ranks for another thread, with its own `timeout`. Collective."""
        return Coordinator(self._transport.duplicate(timeout), self.domains)

    def with_domains(self, domains: Sequence[int]) -> "Coordinator":
        """Return a coordinator of the same ranks, for the same thread, with other storage domains."""
        return Coordinator(self._transport, domains)

    @property
    def is_leader(self) -> bool:
        """Whether this rank is the leader, global rank 0."""
        return self.rank == 0

    @property
    def domain(self) -> int:
        return self.domains[self.rank]

    @property
    def domain_leaders(self) -> list[int]:
        """The storage domains in ascending order; the first is the leader's."""
        return sorted(set(self.domains))

    @property
    def leads_domain(self) -> bool:
        """Whether this rank acts for its storage domain."""
        return self.domain == self.rank

    def all_gather(self, value: T) -> list[T]:
        return self._transport.all_gather(value)

    def broadcast(self, value: T | None, source: int = 0) -> T:
        return self._transport.broadcast(value, source)

    def on_leader(self, action: Callable[[], T]) -> T:
        """Run `action` on the leader, and return its result on every rank."""
        return self.on_rank(0, action)

    def on_rank(self, rank: int, action: Callable[[], T]) -> T:
        """Run `action` on the rank `rank`, and return its result on every rank."""
        error: Exception | None = None
        result: Any = None
        if self.rank == rank:
            try:
                result = action()
            except Exception as caught:
                error = caught
        outcome = (result, error and sendable(error)) if self.rank == rank else None
        result, sent = self.broadcast(outcome, rank)
        if sent is not None:
            raise error if error is not None else sent
        return result

    def on_domain_leaders(self, action: Callable[[], T]) -> list[T]:
        """Run `action` on each domain's leader, and return the results, by ascending leader, on every rank."""
        if len(self.domain_leaders) == 1:
            return [self.on_leader(action)]
        outcomes: list[Any] = self.everywhere(lambda: action() if self.leads_domain else None)
        return [outcomes[leader] for leader in self.domain_leaders]

    def bitwise_or(self, bits: bytes) -> bytes:
        return self._transport.bitwise_or(bits)

    def send_to_domain_leaders(self, action: Callable[[], T]) -> T | None:
        """Run `action` on the leader, and return its result on each domain's leader, None on the other ranks."""
        results: list[T] = []
        self.on_leader(lambda: results.append(action()))
        if len(self.domain_leaders) > 1:
            return self._transport.send_object(results[0] if results else None, 0, self.domain_leaders)
        return results[0] if results else None

    def scatter(self, action: Callable[[], Sequence[T]]) -> T:
        """Run `action` on the leader, which returns one entry per rank. Return each rank's entry on that rank."""
        results: list[Sequence[T]] = []
        self.on_leader(lambda: results.append(action()))
        own: list[T] = [results[0][0]] if results else []
        for rank in range(1, self.world_size):
            value = self._transport.send_object(results[0][rank] if results else None, 0, [rank])
            if rank == self.rank:
                own.append(value)
        return own[0]

    def send(self, block: "Tensor", to: int) -> None:
        self._transport.send(block, to)

    def receive(self, block: "Tensor", source: int) -> None:
        self._transport.receive(block, source)

    def exchange(self, block: "Tensor", to: int, received: "Tensor", source: int) -> None:
        self._transport.exchange(block, to, received, source)

    def everywhere(self, action: Callable[[], T]) -> list[T]:
        """Run `action` on every rank, and return all results on every rank. For small results only."""
        result, error = _tried(action)
        outcomes = self.all_gather((result, error and sendable(error)))
        _raise_first(error, {rank: remote for rank, (_, remote) in enumerate(outcomes) if remote is not None})
        return [value for value, _ in outcomes]

    def collect(self, action: Callable[[], T]) -> list[T] | None:
        """Run `action` on every rank, and return all results on the leader, None on the other ranks."""
        result, error = _tried(action)
        outcomes = self._transport.gather((result, error and sendable(error)), 0)
        failed = {rank: remote for rank, (_, remote) in enumerate(outcomes or []) if remote is not None}
        _raise_first(error, self.broadcast(dict(list(failed.items())[:1])))
        return None if outcomes is None else [value for value, _ in outcomes]

    def combine(self, action: Callable[[], T], how: Callable[[list[T]], U]) -> U:
        """Run `action` on every rank, then `how` on the leader with all results. Return `how`'s result everywhere."""
        found = self.collect(action)
        return self.on_leader(lambda: how(found or []))


def _tried(action: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return action(), None
    except Exception as caught:
        return None, caught


def _raise_first(own: Exception | None, failed: dict[int, Exception]) -> None:
    if own is not None:
        raise own
    for rank, remote in failed.items():
        raise remote from PeerError(f"on rank {rank}")
