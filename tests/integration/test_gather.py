"""Whole tensors out of what real ranks hold of them."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlhf.backends import gather
from rlhf.config import RolloutConfig
from rlhf.experience.policy_sampler import PolicySampler
from rlhf.ranks.dims import everyone
from rlhf.rollout import Weights
from rlhf.rollout.embedded import build_embedded_engine
from rlhf.storage.shards import Shard
from tests.support.checkpoints import equal_bits, run_ranks
from tests.support.engines import make_engine, train
from tests.support.tiny_updates import tiny_qwen2

TOKENIZER = SimpleNamespace(eos_token_id=1)
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
    return Shard(tuple(tensor.shape), (low,), tensor.reshape(-1)[low:high].clone())


def gathered(rank: int, world_size: int, bucket_bytes: int) -> tuple[bool, list[str]]:
    gather.GATHER_BUCKET = bucket_bytes
    shards = [(name, cut(rank, world_size, tensor)) for name, tensor in tensors().items()]
    whole = tensors()["whole"]
    shards = [(n, Shard((2, 2), (0,), whole.reshape(-1)) if n == "whole" else p) for n, p in shards]
    found = list(gather.gather_tensors(shards, everyone()))
    return equal_bits(dict(found), tensors()), [name for name, _ in found]


def cast(rank: int, bucket_bytes: int) -> tuple[bool, int]:
    """Whether casting before the gather gives the bits of casting after it; and the bytes of weights that travelled."""
    gather.GATHER_BUCKET = bucket_bytes
    shards = {name: cut(rank, 2, tensor) for name, tensor in tensors().items()}
    travelled = 0
    all_gather: Any = dist.all_gather

    def counted(received: list[Tensor], sent: Tensor, **options: Any) -> None:
        nonlocal travelled
        travelled += sent.numel() if sent.dtype == torch.uint8 else 0
        all_gather(received, sent, **options)

    dist.all_gather = counted  # type: ignore[assignment]
    try:
        found = dict(gather.gather_tensors(shards.items(), everyone(), dtype=torch.bfloat16))
    finally:
        dist.all_gather = all_gather
    after = {name: t.to(torch.bfloat16) if t.is_floating_point() else t for name, t in tensors().items()}
    return equal_bits(found, after), travelled


def test_a_cast_before_the_gather_equals_one_after_it_with_half_the_bytes(tmp_path: Path) -> None:
    """Integers stay what they are. Each rank has half of each tensor, rounded to whole elements."""
    for bucket_bytes in (1, 1 << 20):
        found = run_ranks(2, partial(cast, bucket_bytes=bucket_bytes), deadline_s=60, join=tmp_path / str(bucket_bytes))
        of_ranks = [
            sum(cut(rank, 2, t).local.numel() * (2 if t.is_floating_point() else 8) for t in tensors().values())
            for rank in range(2)
        ]
        assert [equal for equal, _ in found] == [True, True]
        if bucket_bytes > 1:  # all in one call, of as many bytes as the rank with most of them has
            assert [travelled for _, travelled in found] == [max(of_ranks)] * 2


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_rank_gets_the_whole_to_the_bit_and_in_order(world_size: int, tmp_path: Path) -> None:
    for bucket_bytes in (1, 100, 1 << 20):
        join = tmp_path / str(bucket_bytes)
        function = partial(gathered, world_size=world_size, bucket_bytes=bucket_bytes)
        for equal, names in run_ranks(world_size, function, deadline_s=60, join=join):
            assert equal
            assert names == list(SHAPES)


def handed_over(rank: int) -> tuple[list[torch.dtype], bool]:
    """The types that an engine in bfloat16 was handed, and whether it holds the trained weights, cast."""
    backend = make_engine("fsdp2")
    train(backend, 0)
    engine = build_embedded_engine(tiny_qwen2(1), TOKENIZER, RolloutConfig(dtype="bfloat16"))
    taken: list[torch.dtype] = []
    update = engine.update_weights

    def looking(weights: Weights, version: int) -> None:
        taken.extend(tensor.dtype for _, tensor in weights())
        update(weights, version)

    engine.update_weights = looking  # type: ignore[method-assign]
    PolicySampler(engine, backend, seed=0).generate([], version=1, step=0)
    full = {name: tensor.to(torch.bfloat16) for name, tensor in backend.full_tensors()}
    return taken, equal_bits(dict(engine.model.named_parameters()), full)


def test_an_engine_is_handed_weights_in_its_own_precision(tmp_path: Path) -> None:
    for taken, equal in run_ranks(2, handed_over, deadline_s=60, join=tmp_path / "join"):
        assert set(taken) == {torch.bfloat16}
        assert equal
