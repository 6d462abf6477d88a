"""HSDP: replicas of a sharded model train as one that is sharded over all ranks, and save and open the same
checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as OnDimension

from rlhf.backends.base import TrainingBackend
from rlhf.backends.fsdp2 import Fsdp2Backend
from rlhf.config import Config
from tests.support.checkpoints import equal_bits, make_checkpointer, make_config, resume, run_ranks
from tests.support.engines import ENGINES, accumulate, make_engine, state_of, train

DEADLINE_S = 120
KINDS = ("fsdp2", "hsdp")


def config_of(folder: str, name: str, kind: str = "fsdp2") -> Config:
    config = make_config(Path(folder, name))
    config.backend = ENGINES[kind]
    config.checkpoint.contents = ["model", "optimizer", "extra", "hf_model"]
    return config


def save(backend: TrainingBackend, config: Config) -> list[int]:
    """Save, and say how many elements of weights and moments each rank has written."""
    assert make_checkpointer(config, backend, 2).save(2) is not None
    shards = [*backend.model_shards().values(), *backend.optimizer_shards().values()]
    counts: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(counts, sum(shard.local.numel() for shard in shards if shard.owner))
    return counts


def opened(config: Config, kind: str) -> dict[str, Any]:
    """The state of a fresh engine that opens the newest checkpoint, as it is held and as it is gathered."""
    backend = make_engine(kind, seed=2)
    assert resume(config, backend) == 2
    return {**state_of(backend), "full": {name: tensor.clone() for name, tensor in backend.full_tensors()}}


def on_four(rank: int, folder: str) -> dict[str, Any]:
    said: dict[str, Any] = {}
    for kind in KINDS:
        backend = make_engine(kind, seed=1)
        assert isinstance(backend, Fsdp2Backend)
        accumulate(backend, 0)
        held = [p for p in backend.module.parameters() if isinstance(p, DTensor)]
        grads = {name: p.grad.full_tensor().clone() for name, p in backend.module.named_parameters()}
        said[kind] = {"placements": held[0].placements, "grads": grads, "figures": [backend.optimizer_step()]}
        said[kind]["figures"] += train(backend, 1)
        said[kind]["written"] = save(backend, config_of(folder, kind, kind))
        said[kind]["state"] = state_of(backend)
        said[kind]["copies"] = {name: shard.local.clone() for name, shard in backend.model_shards().items()}
        train(backend, 2)
        said[kind]["end"] = state_of(backend)
    other = make_engine("hsdp", seed=2)
    assert resume(config_of(folder, "hsdp", "hsdp"), other) == 2
    train(other, 2)
    said["resumed"] = state_of(other)
    said["opened"] = {kind: opened(config_of(folder, kind), KINDS[kind == "fsdp2"]) for kind in KINDS}
    return said


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("hsdp")


@pytest.fixture(scope="module")
def found(folder) -> list[dict[str, Any]]:
    return run_ranks(4, on_four, str(folder), deadline_s=DEADLINE_S, join=folder / "join4")


def test_two_replicas_of_two_shards_train_as_four_shards(found):
    plain, replicated = (found[0][kind] for kind in KINDS)
    assert plain["placements"] == (OnDimension(0),)
    assert replicated["placements"] == (Replicate(), OnDimension(0))
    torch.testing.assert_close(replicated["grads"], plain["grads"], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(replicated["figures"], plain["figures"], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(replicated["end"]["model"], plain["end"]["model"], rtol=1e-6, atol=1e-6)


def test_the_replicas_hold_the_same_bits(found):
    copies = [rank["hsdp"]["copies"] for rank in found]
    assert equal_bits(copies[0], copies[2])
    assert equal_bits(copies[1], copies[3])
    assert not equal_bits(copies[0], copies[1])


def test_the_replicas_share_what_is_written(found):
    written, whole = found[0]["hsdp"]["written"], sum(found[0]["fsdp2"]["written"])
    assert sum(written) == whole
    assert max(written) < 1.3 * whole / 4


def test_a_resumed_run_has_the_same_bits(found):
    assert all(equal_bits(rank["resumed"], rank["hsdp"]["end"]) for rank in found)


def test_what_either_saved_the_other_opens(found):
    for rank in found:
        for kind in KINDS:
            state = rank[kind]["state"]
            assert equal_bits(rank["opened"][kind], state | {"full": state["model"]})


def passed_on(rank: int, folder: str) -> list[int]:
    """Open what the replicas saved, and save it as it is."""
    backend = make_engine("fsdp2", seed=2)
    assert resume(config_of(folder, "hsdp"), backend) == 2
    return save(backend, config_of(folder, f"of_{dist.get_world_size()}"))


def opened_by_replicas(rank: int, folder: str) -> list[dict[str, Any]]:
    return [opened(config_of(folder, name), "hsdp") for name in ("of_1", "of_2", "hsdp")]


@pytest.mark.parametrize("ranks", [4, 2])
def test_through_fewer_ranks_and_back(found, folder, ranks, tmp_path):
    """As two replicas of two shards, and as two whole copies."""
    for through in (2, 1):
        if not config_of(str(folder), f"of_{through}").run_dir.exists():
            run_ranks(through, passed_on, str(folder), deadline_s=DEADLINE_S, join=tmp_path / str(through))
    state = found[0]["hsdp"]["state"]
    for rank in run_ranks(ranks, opened_by_replicas, str(folder), deadline_s=DEADLINE_S, join=tmp_path / "join"):
        assert all(equal_bits(result, state | {"full": state["model"]}) for result in rank)
