"""Process groups of one real rank."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def one_of(ranks: int) -> Iterator[None]:
    """A process group in which this process is the first rank and the others are made up. Every rank sends the same."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
