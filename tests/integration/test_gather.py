"""Whole tensors out of what real ranks hold of them."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlhf.backends import gather
from rlhf.storage.shards import Shard
from tests.support.checkpoints import equal_bits, run_ranks

SHAPES = {"a": (3, 5), "scalar": (), "b": (4, 2, 3), "none": (0, 3), "whole": (2, 2), "c": (70,)}


def tensors() -> dict[str, Tensor]:
    """What the ranks hold parts of; signed zeros and NaN with a payload included."""
    torch.manual_seed(0)
    found = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    found["a"][0, :2] = torch.tensor([-0.0, float("nan")])
    found["c"] = torch.randint(-9, 9, (70,))
    return found


def cut(rank: int, world_size: int, tensor: Tensor) -> Shard:
    """Uneven parts: the first rank has half, the last but one nothing if there are three."""
    bounds = {1: [0, 1], 2: [0, 0.5, 1], 3: [0, 0.5, 0.5, 1]}[world_size]
    low, high = (int(bounds[r] * tensor.numel()) for r in (rank, rank + 1))
    return Shard(tuple(tensor.shape), low, tensor.reshape(-1)[low:high].clone())


def gathered(rank: int, world_size: int, bucket_bytes: int) -> tuple[bool, list[str]]:
    gather.BUCKET_BYTES = bucket_bytes
    shards = [(name, cut(rank, world_size, tensor)) for name, tensor in tensors().items()]
    whole = tensors()["whole"]
    shards = [(n, Shard((2, 2), 0, whole.reshape(-1)) if n == "whole" else p) for n, p in shards]
    found = list(gather.whole_tensors(shards))
    return equal_bits(dict(found), tensors()), [name for name, _ in found]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_rank_gets_the_whole_to_the_bit_and_in_order(world_size: int, tmp_path: Path) -> None:
    for bucket_bytes in (1, 100, 1 << 20):
        join = tmp_path / str(bucket_bytes)
        function = partial(gathered, world_size=world_size, bucket_bytes=bucket_bytes)
        for equal, names in run_ranks(world_size, function, deadline_s=60, join=join):
            assert equal
            assert names == list(SHAPES)
