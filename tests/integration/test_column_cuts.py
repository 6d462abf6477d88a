"""Checkpoints of tensors that are sharded by columns, or by rows and columns: every sharding loads every other,
and exports have whole tensors."""

import math
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as OnDimension

from rlhf.backends.fsdp2 import chunk_of, shards_of
from rlhf.backends.gather import gather_tensors
from rlhf.checkpoint.commit.manifest import read_manifest
from rlhf.checkpoint.load.locations import FileLocations
from rlhf.checkpoint.load.restoring import load_state
from rlhf.checkpoint.save.snapshot import RunState
from rlhf.config import Config
from rlhf.ranks import dims
from rlhf.storage.boxes import Box, range_box
from rlhf.storage.file_parts import FilePart, FileParts
from rlhf.storage.layout import rank_file, step_dir
from rlhf.storage.shards import Shard, Shards
from tests.support.checkpoints import (
    PlainRole,
    equal_bits,
    flip_bit,
    make_checkpointer,
    make_config,
    make_driver,
    run_ranks,
)
from tests.support.sources import opened, whole
from tests.support.thread_ranks import make_coordinator, run_thread_ranks

SHAPES = {"even": (64, 48), "odd": (7, 5), "experts": (2, 6, 4), "bias": (9,), "scale": ()}
EXPERTS = {"experts": [FilePart(f"expert.{n // 2}.{('gate', 'up')[n % 2]}", 12 * n, (3, 4)) for n in range(4)]}
CUTS = {"columns": 2, "rows and columns": 4, "rows": 3, "ranges": 3, "whole": 1}
"""Kinds of sharding, with the number of ranks."""


def tensors(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return found | {"odd": found["odd"].bfloat16()}


def box_of(shape: tuple[int, ...], kind: str, rank: int, ranks: int) -> Box:
    if kind == "ranges" or not shape:
        numel = math.prod(shape)
        return range_box(numel * rank // ranks, numel * (rank + 1) // ranks)
    box = Box((0,) * len(shape), shape)
    if kind == "rows and columns" and len(shape) > 1:
        return chunk_of(chunk_of(box, 0, rank // 2, 2), len(shape) - 1, rank % 2, 2)
    return chunk_of(box, 0 if kind == "rows" else len(shape) - 1, rank, ranks)


def cut(whole_ones: dict[str, Tensor], kind: str, rank: int) -> Shards:
    """Return a rank's part of each tensor, in its own memory."""
    found = {}
    for name, tensor in whole_ones.items():
        box = box_of(tuple(tensor.shape), kind, rank, CUTS[kind])
        part = Shard(tuple(tensor.shape), box.offsets, torch.empty(box.sizes, dtype=tensor.dtype))
        found[name] = Shard(part.shape, part.offsets, part.cut(tensor).clone())
    return found


class CutRole(PlainRole):
    """A role with sharded weights and moments."""

    def __init__(self, kind: str, rank: int, seed: int) -> None:
        super().__init__()
        self.weights = cut(tensors(seed), kind, rank)
        self.moments = cut({f"{name}.exp_avg": t.float() for name, t in tensors(seed + 1).items()}, kind, rank)

    def model_shards(self) -> Shards:
        return self.weights

    def optimizer_shards(self) -> Shards:
        return self.moments

    def hf_parts(self) -> FileParts:
        return EXPERTS


def save(rank: int, config: Config, kind: str) -> None:
    make_checkpointer(config, CutRole(kind, rank, seed=1), 1, make_coordinator()).save(1)


def load(rank: int, config: Config, kind: str, contents: list[str]) -> bool:
    coordinator, path = make_coordinator(), step_dir(config.run_dir, 1)
    role, expected = CutRole(kind, rank, seed=7), CutRole(kind, rank, seed=1)
    state = RunState({"actor": role}, make_driver())
    load_state(FileLocations.whole(path, read_manifest(path)), state, contents, 1, coordinator)
    both = [(role.weights, expected.weights)]
    both += [(role.moments, expected.moments)] if "optimizer" in contents else []
    return all(equal_bits(mine[name].local, theirs[name].local) for mine, theirs in both for name in mine)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, Config]:
    """For each kind of sharding, the configuration of a run with a checkpoint."""
    found = {}
    for kind, ranks in CUTS.items():
        config = found[kind] = make_config(tmp_path_factory.mktemp("saved"))
        config.checkpoint.contents = ["model", "optimizer", "extra", "hf_model"]
        run_thread_ranks(ranks, save, config, kind)
    return found


@pytest.mark.parametrize("contents", [["model", "optimizer"], ["hf_model"]], ids=["own", "hf"])
@pytest.mark.parametrize(("writer", "reader"), product(CUTS, CUTS))
def test_every_sharding_loads_every_other_sharding(saved, writer, reader, contents):
    assert run_thread_ranks(CUTS[reader], load, saved[writer], reader, contents) == [True] * CUTS[reader]


@pytest.mark.parametrize("writer", CUTS)
def test_the_export_has_whole_tensors(saved, writer):
    folder = step_dir(saved[writer].run_dir, 1) / "actor/huggingface"
    expected = tensors(1)
    in_files = {name: t for name, t in expected.items() if name != "experts"}
    for part in EXPERTS["experts"]:
        in_files[part.name] = expected["experts"].view(-1)[part.start : part.stop].view(part.shape)
    found: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    assert equal_bits(found, in_files)
    with opened(saved[writer].run_dir) as source:
        assert equal_bits({n: t for n, t in whole(source).items() if n in expected}, expected)


def test_a_flipped_bit_in_columns_is_found(tmp_path):
    config = make_config(tmp_path)
    run_thread_ranks(2, save, config, "columns")
    flip_bit(step_dir(config.run_dir, 1) / "actor/model" / rank_file(1), 8 * 3000)
    with pytest.raises(AssertionError, match=f"DamagedCheckpoint.*{rank_file(1)}: content differs"):
        run_thread_ranks(3, load, config, "rows", ["model"])


def of_dtensors(rank: int) -> dict[str, Any]:
    """Shard tensors on a mesh of two by two, and check that they are gathered whole. Return the shards."""
    mesh = init_device_mesh("cpu", (2, 2))
    placed: dict[str, tuple[Tensor, list[Placement]]] = {
        "both": (tensors(1)["odd"], [OnDimension(0), OnDimension(1)]),
        "columns": (tensors(1)["even"], [Replicate(), OnDimension(1)]),
        "twice": (tensors(1)["even"], [OnDimension(0), OnDimension(0)]),
        "bias": (tensors(1)["bias"], [OnDimension(0), Replicate()]),
    }
    shards = shards_of((name, distribute_tensor(t, mesh, how)) for name, (t, how) in placed.items())
    gathered = {name: tensor.clone() for name, tensor in gather_tensors(shards.items(), dims.everyone())}
    assert equal_bits(gathered, {name: tensor for name, (tensor, _) in placed.items()})
    saved: list[Any] = [None] * 4
    dist.all_gather_object(saved, {name: shard.box for name, shard in shards.items() if shard.saved_here})
    return {"shards": shards, "saved": saved}


def test_sharded_dtensors_become_boxes(tmp_path):
    for rank, found in enumerate(run_ranks(4, of_dtensors, deadline_s=60, join=tmp_path)):
        shards = found["shards"]
        row, column = divmod(rank, 2)
        assert shards["both"].box == Box((4 * row, 3 * column), (4 - row, 3 - column))
        assert shards["columns"].box == Box((0, 24 * column), (64, 24))
        assert shards["twice"].box == range_box(16 * 48 * rank, 16 * 48 * (rank + 1))
        assert shards["bias"].box == range_box(5 * row, 5 + 4 * row)
        parts = {name: [of_rank[name] for of_rank in found["saved"] if name in of_rank] for name in shards}
        counts = {name: len(of_name) for name, of_name in parts.items()}
        assert counts == {"both": 4, "columns": 2, "twice": 4, "bias": 2}
