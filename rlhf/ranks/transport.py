"""Interface for sending objects between ranks, and its single-process implementation. Imports no torch."""

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class LostPeer(RuntimeError):
    """A collective call failed or timed out, so the ranks cannot agree any more."""


class Transport:
    """Exchanges objects (`rlhf.ranks.object_codec`) between ranks. This class is the transport of a single process.

    Every rank must make the same calls in the same order. A call raises LostPeer if a rank is dead or too slow.
    """

    rank, world_size = 0, 1

    def duplicate(self, timeout: timedelta) -> "Transport":
        """Return a transport of the same ranks with its own timeout and its own order of calls. Collective."""
        return self

    def all_gather(self, value: Any) -> list[Any]:
        """Return every rank's `value`, in rank order, on every rank."""
        return [value]

    def gather(self, value: Any, to: int) -> list[Any] | None:
        """Return every rank's `value`, in rank order, on the rank `to`; None on the other ranks."""
        return [value]

    def bitwise_or(self, bits: bytes) -> bytes:
        """Return the bitwise OR of all ranks' `bits` on every rank. All ranks pass the same number of bytes."""
        return bits

    def broadcast(self, value: Any, source: int) -> Any:
        """Return the `value` of the rank `source` on every rank."""
        return value

    def send_object(self, value: Any, source: int, to: Sequence[int]) -> Any:
        """Return the `value` of the rank `source` on the ranks `to`; None on the other ranks, which do not wait."""
        return value

    def send(self, block: "Tensor", to: int) -> None:
        """Send `block`, bytes in CPU memory, to a rank that calls `receive` with as many bytes. Not collective."""
        raise ValueError("a single process has no other rank to send to")

    def receive(self, block: "Tensor", source: int) -> None:
        """Fill `block` with the bytes that the rank `source` sends."""
        raise ValueError("a single process has no other rank to receive from")

    def exchange(self, block: "Tensor", to: int, received: "Tensor", source: int) -> None:
        """Send `block` to the rank `to` while the rank `source` fills `received`.

        All ranks of a ring may call this at once; a peer may call `send` or `receive` instead.
        """
        raise ValueError("a single process has no other rank to exchange with")
