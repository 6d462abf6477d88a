"""Makes process groups in which only this rank is real."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def fake_process_group(ranks: int) -> Iterator[None]:
    """Create a process group with this process as rank 0. The other ranks are made up, and send what rank 0 sends."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
