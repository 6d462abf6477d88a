"""Sends objects and bytes between ranks over gloo."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf.ranks.object_codec import decode, encode
from rlhf.ranks.transport import LostPeer, Transport


@contextmanager
def _collective() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise LostPeer(f"a rank is gone, or did not answer in time: {error}") from error


class GlooTransport(Transport):
    """Sends over a separate gloo group. Without torch.distributed, this process is the only rank.

    `timeout` is for each call; None means PyTorch's default timeout for gloo.
    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        self.rank, self.world_size, self._group = 0, 1, None
        if dist.is_initialized():
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            if self.world_size > 1:
                # Use a group of its own: in the training's group, these calls and the collectives for tensors would
                # have to come in the same order on every rank.
                self._group = dist.new_group(backend="gloo", timeout=timeout)

    def duplicate(self, timeout: timedelta) -> "GlooTransport":
        return GlooTransport(timeout)

    def all_gather(self, value: Any) -> list[Any]:
        if self._group is None:
            return [value]
        with _collective():
            return list(map(decode, gather_bytes(encode(value), self._group)))

    def gather(self, value: Any, to: int) -> list[Any] | None:
        if self._group is None:
            return [value]
        own = encode(value)
        with _collective():
            sizes = _sizes(len(own), self._group)
            longest = max(sizes)
            here = self.rank == to
            received = [torch.empty(longest, dtype=torch.uint8) for _ in sizes] if here else None
            dist.gather(_padded(own, longest), received, dst=to, group=self._group)
        return None if received is None else list(map(decode, _unpadded(received, sizes)))

    def bitwise_or(self, bits: bytes) -> bytes:
        if self._group is None or not bits:
            return bits
        total = torch.frombuffer(bytearray(bits), dtype=torch.uint8)
        with _collective():
            dist.all_reduce(total, op=dist.ReduceOp.BOR, group=self._group)
        return total.numpy().tobytes()

    def send_object(self, value: Any, source: int, to: Sequence[int]) -> Any:
        if self._group is None:
            return value
        if self.rank == source:
            message = encode(value)
            for rank in to:
                if rank != source:
                    self.send(torch.tensor([len(message)]), rank)
                    self.send(_padded(message, len(message)), rank)
            return value
        if self.rank not in to:
            return None
        size = torch.empty(1, dtype=torch.int64)
        self.receive(size, source)
        received = torch.empty(int(size), dtype=torch.uint8)
        self.receive(received, source)
        return decode(received.numpy().tobytes())

    def broadcast(self, value: Any, source: int) -> Any:
        if self._group is None:
            return value
        message = encode(value) if self.rank == source else b""
        size = torch.tensor([len(message)])
        with _collective():
            dist.broadcast(size, source, group=self._group)
            content = _padded(message, int(size))
            dist.broadcast(content, source, group=self._group)
        return value if self.rank == source else decode(content.numpy().tobytes())

    def send(self, block: Tensor, to: int) -> None:
        with _collective():
            dist.send(block, to, group=self._group)

    def receive(self, block: Tensor, source: int) -> None:
        with _collective():
            dist.recv(block, source, group=self._group)

    def exchange(self, block: Tensor, to: int, received: Tensor, source: int) -> None:
        with _collective():
            _exchange(block, to, received, source, self._group)


def gather_bytes(content: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """Return the `content` of every rank of a gloo group, in rank order, on every rank. Collective over the group.

    Bruck's algorithm: in each round a rank sends all contents that it has, so the number it has doubles. gloo's own
    all-gather is a ring, in which each of 1,024 ranks would wait for 1,023 messages in turn, instead of 20.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    found = [content]  # of this rank and the ranks that follow it
    while (count := len(found)) < size:
        sent = found[: size - count]
        to, source = (dist.get_global_rank(group, (rank + step) % size) for step in (-count, count))
        sizes = torch.empty(len(sent), dtype=torch.int64)
        _exchange(torch.tensor(list(map(len, sent))), to, sizes, source, group)
        received = torch.empty(int(sizes.sum()), dtype=torch.uint8)
        _exchange(_padded(b"".join(sent), sum(map(len, sent))), to, received, source, group)
        found += [part.numpy().tobytes() for part in received.split(sizes.tolist())]
    return found[size - rank :] + found[: size - rank]


def _exchange(block: Tensor, to: int, received: Tensor, source: int, group: dist.ProcessGroup | None) -> None:
    """Send `block` to the global rank `to` while the global rank `source` fills `received`."""
    sending = dist.isend(block, to, group=group)
    dist.recv(received, source, group=group)
    assert sending is not None  # isend returns None only on ranks outside of the group
    sending.wait()


def _sizes(own: int, group: dist.ProcessGroup) -> list[int]:
    """Return the sizes of all ranks. Collective."""
    return [int.from_bytes(size, "little") for size in gather_bytes(own.to_bytes(8, "little"), group)]


def _padded(content: bytes, size: int) -> Tensor:
    """Return `content` as a tensor of `size` bytes. A gloo collective needs tensors of equal size on all ranks."""
    padded = torch.zeros(size, dtype=torch.uint8)
    if content:
        padded[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return padded


def _unpadded(received: Sequence[Tensor], sizes: Sequence[int]) -> list[bytes]:
    return [tensor[:size].numpy().tobytes() for tensor, size in zip(received, sizes, strict=True)]
