"""Coordinator of the ranks' work on the run directory: one leader acts, and its outcome, good or bad, is everyone's.

Where nodes have disks of their own, there is one such leader for each storage domain. A `Transport` carries the objects
from rank to rank. Imports no torch.
"""

import pickle
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from rlhf.ranks.transport import Transport

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
U = TypeVar("U")


class PeerError(RuntimeError):
    """An error that happened on other ranks; the text names them."""


def _sendable(error: Exception) -> Exception:
    """`error` itself if it survives the way to another process and back, else its text."""
    try:
        # Both ways: many classes that pickle (own arguments of __init__) fail when the receiver rebuilds them.
        pickle.loads(pickle.dumps(error))  # noqa: S301
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


class Coordinator:
    """Collective calls over Python objects; every rank must make the same ones in the same order.

    `domains` has each rank's storage domain, which is named by its leader, the lowest rank that sees the same run
    directory. By default all ranks share one. A call raises LostPeer when a rank is
    gone, or does not answer in time.
    """

    def __init__(self, transport: Transport, domains: Sequence[int] | None = None) -> None:
        self._transport = transport
        self.rank, self.world_size = self._transport.rank, self._transport.world_size
        self.domains = list(domains or [0] * self.world_size)

    def another(self, timeout: timedelta) -> "Coordinator":
        """A further coordinator of the same ranks, for another thread of each; a call of it may take `timeout`.
        Collective."""
        return Coordinator(self._transport.another(timeout), self.domains)

    @property
    def is_leader(self) -> bool:
        """The leader is the driver, global rank 0."""
        return self.rank == 0

    @property
    def domain(self) -> int:
        """This rank's storage domain."""
        return self.domains[self.rank]

    @property
    def domain_leaders(self) -> list[int]:
        """The storage domains in ascending order; the first one is the driver's."""
        return sorted(set(self.domains))

    @property
    def leads_domain(self) -> bool:
        """Whether this rank acts for its storage domain."""
        return self.domain == self.rank

    def gather(self, value: T) -> list[T]:
        """`value` of every rank, in rank order, on every rank."""
        return self._transport.gather(value)

    def broadcast(self, value: T | None, source: int = 0) -> T:
        """The `value` of the rank `source`, by default the leader, on every rank."""
        return self._transport.broadcast(value, source)

    def on_leader(self, action: Callable[[], T]) -> T:
        """Run `action` on the leader only; every rank gets its result, or raises when it raised. No rank is left
        waiting."""
        return self.on_rank(0, action)

    def on_rank(self, rank: int, action: Callable[[], T]) -> T:
        """The same on any rank."""
        error: Exception | None = None
        result: Any = None
        if self.rank == rank:
            try:
                result = action()
            except Exception as caught:
                error = caught
        outcome = (result, error and _sendable(error)) if self.rank == rank else None
        result, sent = self.broadcast(outcome, rank)
        if sent is not None:
            raise error if error is not None else sent
        return result

    def on_domain_leaders(self, action: Callable[[], T]) -> list[T]:
        """Run `action` on the leader of each storage domain; every rank gets all results, in the order of
        `domain_leaders`, or raises."""
        if len(self.domain_leaders) == 1:
            return [self.on_leader(action)]
        outcomes: list[Any] = self.everywhere(lambda: action() if self.leads_domain else None)
        return [outcomes[leader] for leader in self.domain_leaders]

    def union(self, bits: bytes) -> bytes:
        """The bits that are set on any rank; on every rank."""
        return self._transport.union(bits)

    def for_domain_leaders(self, action: Callable[[], T]) -> T | None:
        """Run `action` on the leader; its result goes to the leader of each storage domain, None to all other ranks.
        Every rank raises when it raised."""
        results: list[T] = []
        self.on_leader(lambda: results.append(action()))
        if len(self.domain_leaders) > 1:
            return self._transport.share(results[0] if results else None, 0, self.domain_leaders)
        return results[0] if results else None

    def hand_out(self, action: Callable[[], Sequence[T]]) -> T:
        """Run `action` on the leader; every rank gets its own entry of the result, in rank order. Every rank raises
        when it raised."""
        results: list[Sequence[T]] = []
        self.on_leader(lambda: results.append(action()))
        own: list[T] = [results[0][0]] if results else []
        for rank in range(1, self.world_size):
            value = self._transport.share(results[0][rank] if results else None, 0, [rank])
            if rank == self.rank:
                own.append(value)
        return own[0]

    def send(self, block: "Tensor", to: int) -> None:
        """Hand `block`, bytes in the memory of the CPU, to a rank that calls `receive` with as many. Only these two
        take part."""
        self._transport.send(block, to)

    def receive(self, block: "Tensor", source: int) -> None:
        """Fill `block` with what the rank `source` sends."""
        self._transport.receive(block, source)

    def everywhere(self, action: Callable[[], T]) -> list[T]:
        """Run `action` on every rank and return all results; when it raises anywhere, every rank raises.

        Every rank gets the results of all: for small ones only."""
        result, error = _tried(action)
        outcomes = self.gather((result, error and _sendable(error)))
        _raise_first(error, {rank: remote for rank, (_, remote) in enumerate(outcomes) if remote is not None})
        return [value for value, _ in outcomes]

    def collect(self, action: Callable[[], T]) -> list[T] | None:
        """Run `action` on every rank; the leader gets all results, other ranks None. When it raises anywhere, every
        rank raises."""
        result, error = _tried(action)
        outcomes = self._transport.collect((result, error and _sendable(error)), 0)
        failed = {rank: remote for rank, (_, remote) in enumerate(outcomes or []) if remote is not None}
        _raise_first(error, self.broadcast(dict(list(failed.items())[:1])))
        return None if outcomes is None else [value for value, _ in outcomes]

    def combine(self, action: Callable[[], T], how: Callable[[list[T]], U]) -> U:
        """Run `action` on every rank; every rank gets what `how` makes of all results, or raises when either raised."""
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
