"""Transport of objects between the ranks of one group, at first of a process that acts alone. Imports no torch."""

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class LostPeer(RuntimeError):
    """A collective call failed or took too long: the ranks can agree on nothing any more."""


class Transport:
    """Exchange of pickled objects between the ranks of one group; this one, of a process that acts alone, whatever
    group it may belong to.

    Every rank must make the same calls in the same order. Each raises LostPeer when a rank is gone, or does not answer
    in time.
    """

    rank, world_size = 0, 1

    def another(self, timeout: timedelta) -> "Transport":
        """A further group of the same ranks with a deadline of its own, whose calls are in no order with this one's.
        Collective."""
        return self

    def gather(self, value: Any) -> list[Any]:
        """`value` of every rank, in rank order, on every rank."""
        return [value]

    def collect(self, value: Any, to: int) -> list[Any] | None:
        """`value` of every rank, in rank order, on the rank `to`; None on all others."""
        return [value]

    def union(self, bits: bytes) -> bytes:
        """The bits that are set on any rank, of as many on each; on every rank."""
        return bits

    def broadcast(self, value: Any, source: int) -> Any:
        """The `value` of the rank `source` on every rank."""
        return value

    def share(self, value: Any, source: int, to: Sequence[int]) -> Any:
        """The `value` of the rank `source` on the ranks `to`; None on all others, which take no part."""
        return value

    def send(self, block: "Tensor", to: int) -> None:
        """Hand `block`, bytes in the memory of the CPU, to a rank that calls `receive` with as many. Only these two
        take part."""
        raise ValueError("nobody is there to send to")

    def receive(self, block: "Tensor", source: int) -> None:
        """Fill `block` with what the rank `source` sends."""
        raise ValueError("nobody is there to receive from")
