"""Whole replicas on two ranks: they train like shards, and save and load the same checkpoints, of whole models and of
adapters."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from rlhf.assemble import replicas
from rlhf.assemble.replicas import settle_replicas
from rlhf.backends import gradient_sums
from rlhf.config import Config
from rlhf.planning import check
from tests.support.adapted_engines import ADAPTED, engine_with_or_without_adapters
from tests.support.checkpoints import equal_bits, make_checkpointer, make_config, make_coordinator, resume, run_ranks
from tests.support.engines import ENGINES, accumulate, state_of, train
from tests.support.in_float64 import TOLERANCE, in_float64

DEADLINE_S = 120
REPLICAS = "hsdp"
"""This engine on two ranks: two replicas of one rank each."""
KINDS = ("fsdp2", REPLICAS)
WHOLE_AND_ADAPTERS = pytest.mark.parametrize("trained", ["", ADAPTED], ids=["whole", "adapters"])


def config_of(folder: str, name: str, kind: str) -> Config:
    config = make_config(Path(folder, name))
    config.backend = replace(ENGINES[kind], dp_replicate=ENGINES[kind].replicas)
    config.trainer.nproc = 2
    config.checkpoint.contents = ["model", "optimizer", "extra"]
    return config


@in_float64()
def exactly(name: str) -> dict[str, Any]:
    """Return metrics and final state of three steps of two micro-batches, and the gradient sums of one step."""
    backend, sums = engine_with_or_without_adapters(name, seed=1), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradient_sums, "all_sum", lambda flat, send=gradient_sums.all_sum: sums.append(1) or send(flat))
        accumulate(backend, 0)
        before = len(sums)
        figures = [backend.optimizer_step()]
    figures += train(backend, 1, 2)
    units = sum(isinstance(module, FSDPModule) for module in backend.module.modules())
    return {"figures": figures, "exact": state_of(backend), "sums": (before, len(sums)), "units": units}


def saved(folder: str, name: str, kind: str) -> dict[str, Any]:
    """Train two steps, save, train on, and resume from the save with a new engine."""
    backend, config = engine_with_or_without_adapters(name, seed=1), config_of(folder, name, kind)
    train(backend, 0, 1)
    assert make_checkpointer(config, backend, 2).save(2) is not None
    shards = {**backend.model_shards(), **backend.optimizer_shards()}
    kept = {"state": state_of(backend), "saved": {name for name, shard in shards.items() if shard.saved_here}}
    kept["copy"] = {name: shard.local.clone() for name, shard in shards.items()}
    kept["numel"] = sum(shard.local.numel() for shard in shards.values() if shard.saved_here)
    train(backend, 2)
    resumed = engine_with_or_without_adapters(name, seed=2)
    assert resume(config, resumed) == 2
    train(resumed, 2)
    return kept | {"end": state_of(backend), "resumed": state_of(resumed)}


def opened(folder: str, name: str, kind: str, by: str) -> dict[str, Any]:
    backend = engine_with_or_without_adapters(by, seed=3)
    assert resume(config_of(folder, name, kind), backend) == 2
    return state_of(backend)


def on_two(rank: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {"absent": absent_gradients(rank)}
    for trained in ("", ADAPTED):
        found[trained] = {kind: exactly(kind + trained) | saved(folder, kind + trained, kind) for kind in KINDS}
    kept = (f"{REPLICAS}, two machines", f"{REPLICAS}, no memory")
    new = ("new", "new, little memory", "new, two machines")
    found["settled"] = {name: settled(folder, name, rank) for name in (*KINDS, *kept, *new)}
    for trained in ("", ADAPTED):
        for kind, other in (KINDS, KINDS[::-1]):
            found[trained][kind]["opened"] = opened(folder, kind + trained, kind, other + trained)
    return found


def settled(folder: str, name: str, rank: int) -> int | None:
    """Return `dp_replicate` as settled for a run that does not set it, in a directory with a save or in a new one."""
    config = config_of(folder, name.partition(",")[0], "fsdp2")
    config.backend.dp_replicate = None
    with pytest.MonkeyPatch.context() as patch:
        if "little" in name:
            patch.setattr(check, "machine_memory", lambda: 1 << 30)
        if "no memory" in name:
            patch.setattr(check, "machine_memory", lambda: 1 << 20)
        if "machines" in name:
            patch.setattr(replicas, "machine", lambda: f"machine {rank}")
        return settle_replicas(config, make_coordinator()).backend.dp_replicate


def absent_gradients(rank: int) -> list[list[Any]]:
    """Return summed gradients of four parameters, in one bucket and in a bucket each. Some ranks lack gradients."""
    found = []
    for size in (gradient_sums.GRADIENT_BUCKET, 1):
        parameters = [nn.Parameter(torch.zeros(2, 3)) for _ in range(4)]
        parameters.append(nn.Parameter(torch.zeros(2), requires_grad=False))
        for number, has in enumerate((True, rank == 0, rank == 1, False)):
            if has:
                parameters[number].grad = torch.full((2, 3), 10.0 * (number + 1) + rank)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gradient_sums, "GRADIENT_BUCKET", size)
            gradient_sums.sum_gradients(parameters)
        found.append([None if p.grad is None else p.grad.unique().tolist() for p in parameters])
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("replicas")


@pytest.fixture(scope="module")
def found(folder) -> list[dict[str, Any]]:
    return run_ranks(2, on_two, str(folder), deadline_s=DEADLINE_S, join=folder / "join")


@WHOLE_AND_ADAPTERS
def test_replicas_train_as_shards(found, trained):
    shards, replicas = (found[0][trained][kind] for kind in KINDS)
    assert shards["units"]
    assert not replicas["units"]
    for part in ("figures", "exact"):
        torch.testing.assert_close(replicas[part], shards[part], rtol=TOLERANCE, atol=TOLERANCE)


@WHOLE_AND_ADAPTERS
def test_gradients_are_sent_once_per_optimizer_step(found, trained):
    assert found[0][trained][REPLICAS]["sums"] == (0, 1)


def test_gradients_missing_on_some_ranks_are_summed_and_on_all_stay_none(found):
    assert all(rank["absent"] == [[[21.0], [20.0], [31.0], None, None]] * 2 for rank in found)


@WHOLE_AND_ADAPTERS
def test_both_ranks_have_the_same_bits(found, trained):
    first, second = (rank[trained][REPLICAS] for rank in found)
    assert equal_bits(first["copy"], second["copy"])


@WHOLE_AND_ADAPTERS
def test_each_tensor_is_saved_by_one_rank_and_both_save_about_half(found, trained):
    first, second = (rank[trained][REPLICAS] for rank in found)
    assert first["saved"].isdisjoint(second["saved"])
    assert first["saved"] | second["saved"] == first["copy"].keys()
    assert all(name.endswith(".step") is False for name in second["saved"])
    assert max(first["numel"], second["numel"]) < 0.6 * (first["numel"] + second["numel"])
    whole = sum(rank[trained]["fsdp2"]["numel"] for rank in found)
    assert first["numel"] + second["numel"] == whole


def test_dp_replicate_null_follows_the_checkpoint_or_the_memory_plan(found):
    for rank in found:
        kept = {"fsdp2": 1, REPLICAS: 2, f"{REPLICAS}, two machines": 1, f"{REPLICAS}, no memory": 1}
        assert rank["settled"] == kept | {"new": 2, "new, little memory": 1, "new, two machines": 1}


@WHOLE_AND_ADAPTERS
def test_a_resumed_run_has_the_same_bits(found, trained):
    assert all(equal_bits(rank[trained][REPLICAS]["resumed"], rank[trained][REPLICAS]["end"]) for rank in found)


@WHOLE_AND_ADAPTERS
def test_shards_and_replicas_load_checkpoints_of_each_other(found, trained):
    for rank in found:
        for kind in KINDS:
            assert equal_bits(rank[trained][kind]["opened"], rank[trained][kind]["state"])
