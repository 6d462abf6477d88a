"""Sends pickled objects and bytes between ranks over gloo."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf.ranks.transport import LostPeer, Transport


@contextmanager
def _collective() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise LostPeer(f"a rank is gone, or did not answer in time: {error}") from error


class GlooTransport(Transport):
    """`Transport` over a gloo group of its own; a world of one rank if torch.distributed is not initialized.

    `timeout` is for each call; None is the timeout of the training's group.
    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        self.rank, self.world_size, self._group = 0, 1, None
        if dist.is_initialized():
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            if self.world_size > 1:
                # On the training group, these calls would have to keep one order with its tensor collectives.
                self._group = dist.new_group(backend="gloo", timeout=timeout)

    def duplicate(self, timeout: timedelta) -> "GlooTransport":
        return GlooTransport(timeout)

    def all_gather(self, value: Any) -> list[Any]:
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        with _collective():
            dist.all_gather_object(values, value, group=self._group)
        return values

    def gather(self, value: Any, to: int) -> list[Any] | None:
        if self._group is None:
            return [value]
        values: list[Any] | None = [None] * self.world_size if self.rank == to else None
        with _collective():
            dist.gather_object(value, values, dst=to, group=self._group)
        return values

    def bitwise_or(self, bits: bytes) -> bytes:
        if self._group is None or not bits:
            return bits
        total = torch.frombuffer(bytearray(bits), dtype=torch.uint8)
        with _collective():
            dist.all_reduce(total, op=dist.ReduceOp.BOR, group=self._group)
        return total.numpy().tobytes()

    def send_object(self, value: Any, source: int, to: Sequence[int]) -> Any:
        if self._group is None or self.rank == source:
            with _collective():
                for rank in to if self._group is not None else ():
                    if rank != source:
                        dist.send_object_list([value], dst=rank, group=self._group)
            return value
        if self.rank not in to:
            return None
        received: list[Any] = [None]
        with _collective():
            dist.recv_object_list(received, src=source, group=self._group)
        return received[0]

    def broadcast(self, value: Any, source: int) -> Any:
        if self._group is None:
            return value
        values = [value]
        with _collective():
            dist.broadcast_object_list(values, src=source, group=self._group)
        return values[0]

    def send(self, block: Tensor, to: int) -> None:
        with _collective():
            dist.send(block, to, group=self._group)

    def receive(self, block: Tensor, source: int) -> None:
        with _collective():
            dist.recv(block, source, group=self._group)
