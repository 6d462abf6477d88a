"""Whole tensors, gathered from the parts on real ranks."""

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf.backends import gather
from rlhf.config import RolloutConfig
from rlhf.experience.policy_sampler import PolicySampler
from rlhf.ranks.dims import RankGroup, everyone
from rlhf.rollout import Weights
from rlhf.rollout.embedded import build_embedded_engine
from rlhf.storage.shards import Shard
from tests.support.checkpoints import equal_bits, run_ranks
from tests.support.engines import make_engine, train
from tests.support.fake_ranks import fake_process_group
from tests.support.tiny_updates import tiny_qwen2

TOKENIZER = SimpleNamespace(eos_token_id=1)
SHAPES = {"a": (3, 5), "scalar": (), "b": (4, 2, 3), "none": (0, 3), "whole": (2, 2), "c": (70,)}


def tensors() -> dict[str, Tensor]:
    """Return the tensors of which each rank has a part. They include a negative zero and a NaN."""
    torch.manual_seed(0)
    found = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    found["a"][0, :2] = torch.tensor([-0.0, float("nan")])
    found["c"] = torch.randint(-9, 9, (70,))
    return found


def cut(rank: int, world_size: int, tensor: Tensor) -> Shard:
    """Return a rank's part. Parts are uneven: the first rank has half; of three ranks, the second has nothing."""
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
    """Return whether a cast before the gather gives the bits of a cast after it, and the bytes of weights sent."""
    gather.GATHER_BUCKET = bucket_bytes
    shards = {name: cut(rank, 2, tensor) for name, tensor in tensors().items()}
    travelled = 0
    gather_from = gather.gather_from

    def counted(ranks: RankGroup, sent: Tensor) -> Tensor:
        nonlocal travelled
        travelled += sent.numel() if sent.dtype == torch.uint8 else 0
        return gather_from(ranks, sent)

    gather.gather_from = counted
    try:
        found = dict(gather.gather_tensors(shards.items(), everyone(), dtype=torch.bfloat16))
    finally:
        gather.gather_from = gather_from
    after = {name: t.to(torch.bfloat16) if t.is_floating_point() else t for name, t in tensors().items()}
    return equal_bits(found, after), travelled


def test_a_cast_before_the_gather_equals_one_after_it_with_half_the_bytes(tmp_path: Path) -> None:
    """Integers keep their type. Each rank has half of each tensor, rounded to whole elements."""
    for bucket_bytes in (1, 1 << 20):
        found = run_ranks(2, partial(cast, bucket_bytes=bucket_bytes), deadline_s=60, join=tmp_path / str(bucket_bytes))
        of_ranks = [
            sum(cut(rank, 2, t).local.numel() * (2 if t.is_floating_point() else 8) for t in tensors().values())
            for rank in range(2)
        ]
        assert [equal for equal, _ in found] == [True, True]
        if bucket_bytes > 1:  # one call, in which each rank sends as many bytes as the largest part has
            assert [travelled for _, travelled in found] == [max(of_ranks)] * 2


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_rank_receives_whole_tensors_bit_for_bit_in_order(world_size: int, tmp_path: Path) -> None:
    for bucket_bytes in (1, 100, 1 << 20):
        join = tmp_path / str(bucket_bytes)
        function = partial(gathered, world_size=world_size, bucket_bytes=bucket_bytes)
        for equal, names in run_ranks(world_size, function, deadline_s=60, join=join):
            assert equal
            assert names == list(SHAPES)


EQUAL = {
    "bytes": torch.arange(2, dtype=torch.uint8),  # so the next tensor begins at an odd address
    "floats": torch.tensor([[-0.0, 1.5], [float("nan"), 2.5]]),
    "half": torch.arange(24).view(4, 3, 2).bfloat16(),
    "flags": torch.tensor([True, False]),
    "double": torch.arange(6, dtype=torch.float64),
}


def equal_parts(rank: int, bucket_bytes: int, *, swapped: bool) -> tuple[bool, int]:
    """Gather tensors of which two ranks have equal parts. Return whether they are right, and the number of calls.
    With `swapped` the first rank has the second half."""
    gather.GATHER_BUCKET = bucket_bytes
    calls, gather_from = 0, gather.gather_from

    def counted(ranks: RankGroup, sent: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return gather_from(ranks, sent)

    gather.gather_from = counted
    half = 1 - rank if swapped else rank
    shards = []
    for name, tensor in EQUAL.items():
        part = tensor.reshape(-1).chunk(2)[half]
        shards.append((name, Shard(tuple(tensor.shape), (half * part.numel(),), part)))
    found = list(gather.gather_tensors(shards, everyone()))
    return [name for name, _ in found] == list(EQUAL) and equal_bits(dict(found), EQUAL), calls


@pytest.mark.parametrize("swapped", [False, True])
def test_equal_parts_give_the_whole_to_the_bit(swapped: bool, tmp_path: Path) -> None:
    for bucket_bytes, buckets in ((1, len(EQUAL)), (1 << 20, 1)):
        function = partial(equal_parts, bucket_bytes=bucket_bytes, swapped=swapped)
        found = run_ranks(2, function, deadline_s=60, join=tmp_path / str(bucket_bytes))
        assert found == [(True, 1 + buckets)] * 2  # the first call gathers the parts' bounds


class Operations(TorchDispatchMode):
    """Counts torch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        self.count += 1
        return function(*arguments, **options or {})


def work(world_size: int, bucket_bytes: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Return the torch operations and Python calls of a gather of a model on one of `world_size` ranks."""
    gather_from, calls = gather.gather_from, 0
    monkeypatch.setattr(gather, "GATHER_BUCKET", bucket_bytes)

    def with_bounds(ranks: RankGroup, sent: Tensor) -> Tensor:
        every = gather_from(ranks, sent)
        if sent.dtype == torch.int64:  # `fake_process_group` repeats this rank's bounds for all ranks: set the others'
            every[..., 0] = torch.arange(world_size)[:, None] * sent[:, 1]
        return every

    def count(_: Any, event: str, __: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    shards = [(f"{i}", Shard((world_size, 4), (0, 0), torch.ones(1, 4))) for i in range(20)]
    with fake_process_group(world_size), monkeypatch.context() as patch, Operations() as operations:
        patch.setattr(gather, "gather_from", with_bounds)
        sys.setprofile(count)
        try:
            found = list(gather.gather_tensors(shards, everyone()))
        finally:
            sys.setprofile(None)
    assert all(torch.equal(tensor, torch.ones(world_size, 4)) for _, tensor in found)
    assert len(found) == len(shards)
    return operations.count, calls


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_the_work_of_a_gather_does_not_grow_with_the_ranks(bucket_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    work(8, bucket_bytes, monkeypatch)  # the first call also imports modules, which must not count
    few, many = (work(ranks, bucket_bytes, monkeypatch) for ranks in (8, 512))
    assert few == many


def handed_over(rank: int) -> tuple[list[torch.dtype], bool]:
    """Return the types that an engine in bfloat16 received, and whether it has the trained weights, cast."""
    backend = make_engine("fsdp2")
    train(backend, 0)
    engine = build_embedded_engine(tiny_qwen2(1), TOKENIZER, RolloutConfig(dtype="bfloat16"))
    dtypes: list[torch.dtype] = []
    update = engine.update_weights

    def looking(weights: Weights, version: int) -> None:
        dtypes.extend(tensor.dtype for _, tensor in weights())
        update(weights, version)

    engine.update_weights = looking  # type: ignore[method-assign]
    PolicySampler(engine, backend, seed=0).generate([], version=1, step=0)
    full = {name: tensor.to(torch.bfloat16) for name, tensor in backend.full_tensors()}
    return dtypes, equal_bits(dict(engine.model.named_parameters()), full)


def test_an_engine_is_handed_weights_in_its_own_precision(tmp_path: Path) -> None:
    for dtypes, equal in run_ranks(2, handed_over, deadline_s=60, join=tmp_path / "join"):
        assert set(dtypes) == {torch.bfloat16}
        assert equal
