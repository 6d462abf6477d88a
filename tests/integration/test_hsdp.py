"""HSDP: replicas of a sharded model train like a model sharded over all ranks, and save and load the same checkpoints.
Tests whole models and adapters, also ZeRO's adapters, and loads on more ranks than saved."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard as OnDimension

from rlhf.backends.base import TrainingBackend
from rlhf.backends.fsdp2 import Fsdp2Backend
from rlhf.config import Config
from tests.support.adapted_engines import ADAPTED, engine_with_or_without_adapters
from tests.support.checkpoints import equal_bits, make_checkpointer, make_config, resume, run_ranks
from tests.support.engines import ENGINES, NEEDS_DEEPSPEED, accumulate, state_of, train
from tests.support.in_float64 import TOLERANCE, in_float64

pytestmark = NEEDS_DEEPSPEED
DEADLINE_S = 120
KINDS = ("fsdp2", "hsdp")
PASSED_ON = [("fsdp2", ""), ("fsdp2", ADAPTED), ("zero2", ADAPTED)]
WHOLE_AND_ADAPTERS = pytest.mark.parametrize("trained", ["", ADAPTED], ids=["whole", "adapters"])


def config_of(folder: str, name: str, kind: str = "fsdp2") -> Config:
    config = make_config(Path(folder, name))
    config.backend = ENGINES[kind.removesuffix(ADAPTED)]
    exports = [] if name.endswith(ADAPTED) else ["hf_model"]
    config.checkpoint.contents = ["model", "optimizer", "extra", *exports]
    return config


def save(backend: TrainingBackend, config: Config) -> list[int]:
    """Save, and return how many elements of weights and moments each rank has written."""
    assert make_checkpointer(config, backend, 2).save(2) is not None
    shards = [*backend.model_shards().values(), *backend.optimizer_shards().values()]
    counts: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(counts, sum(shard.local.numel() for shard in shards if shard.saved_here))
    return counts


def opened(config: Config, kind: str) -> dict[str, Any]:
    """Return the state of a new engine that loads the newest checkpoint, and its gathered full tensors."""
    backend = engine_with_or_without_adapters(kind, seed=2)
    assert resume(config, backend) == 2
    return seen(backend)


def seen(backend: TrainingBackend) -> dict[str, Any]:
    return {**state_of(backend), "full": {name: tensor.clone() for name, tensor in backend.full_tensors()}}


def on_four(rank: int, folder: str) -> dict[str, Any]:
    return {trained: of_all_or_adapters(folder, trained) for trained in ("", ADAPTED)}


@in_float64()
def exactly(name: str) -> dict[str, Any]:
    """Return the first gradient, and the metrics and the final state of three steps."""
    backend = engine_with_or_without_adapters(name, seed=1)
    assert isinstance(backend, Fsdp2Backend)
    accumulate(backend, 0)
    held = {name: p for name, p in backend.module.named_parameters() if p.grad is not None}
    grads = {name: p.grad.full_tensor().clone() for name, p in held.items()}
    figures = [backend.optimizer_step(), *train(backend, 1, 2)]
    placements = next(iter(held.values())).placements
    return {"placements": placements, "grads": grads, "figures": figures, "end": state_of(backend)}


def of_all_or_adapters(folder: str, trained: str) -> dict[str, Any]:
    kinds = [kind + trained for kind in KINDS]
    results: dict[str, Any] = {"exactly": {kind: exactly(name) for kind, name in zip(KINDS, kinds, strict=True)}}
    for kind, name in zip(KINDS, kinds, strict=True):
        backend = engine_with_or_without_adapters(name, seed=1)
        train(backend, 0, 1)
        results[kind] = {"written": save(backend, config_of(folder, name, name))}
        results[kind]["state"] = seen(backend)
        results[kind]["copies"] = {name: shard.local.clone() for name, shard in backend.model_shards().items()}
        train(backend, 2)
        results[kind]["end"] = state_of(backend)
    other = engine_with_or_without_adapters(kinds[1], seed=2)
    assert resume(config_of(folder, kinds[1], kinds[1]), other) == 2
    train(other, 2)
    results["resumed"] = state_of(other)
    results["opened"] = {
        kind: opened(config_of(folder, kind + trained), reader)
        for kind, reader in zip(KINDS, reversed(kinds), strict=True)
    }
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("hsdp")


@pytest.fixture(scope="module")
def found(folder) -> list[dict[str, Any]]:
    return run_ranks(4, on_four, str(folder), deadline_s=DEADLINE_S, join=folder / "join4")


@WHOLE_AND_ADAPTERS
def test_two_replicas_of_two_shards_train_as_four_shards(found, trained):
    plain, replicated = (found[0][trained]["exactly"][kind] for kind in KINDS)
    assert plain["placements"] == (OnDimension(0),)
    assert replicated["placements"] == (Replicate(), OnDimension(0))
    for part in ("grads", "figures", "end"):
        torch.testing.assert_close(replicated[part], plain[part], rtol=TOLERANCE, atol=TOLERANCE)


@WHOLE_AND_ADAPTERS
def test_the_replicas_hold_the_same_bits(found, trained):
    copies = [rank[trained]["hsdp"]["copies"] for rank in found]
    assert equal_bits(copies[0], copies[2])
    assert equal_bits(copies[1], copies[3])
    assert not equal_bits(copies[0], copies[1])


@WHOLE_AND_ADAPTERS
def test_the_replicas_divide_the_written_bytes(found, trained):
    written, whole = found[0][trained]["hsdp"]["written"], sum(found[0][trained]["fsdp2"]["written"])
    assert sum(written) == whole
    assert max(written) < 1.3 * whole / 4


@WHOLE_AND_ADAPTERS
def test_a_resumed_run_has_the_same_bits(found, trained):
    assert all(equal_bits(rank[trained]["resumed"], rank[trained]["hsdp"]["end"]) for rank in found)


@WHOLE_AND_ADAPTERS
def test_hsdp_and_fsdp2_load_checkpoints_of_each_other(found, trained):
    for rank in found:
        for kind in KINDS:
            assert equal_bits(rank[trained]["opened"][kind], rank[trained][kind]["state"])


def test_the_sent_weights_equal_the_trained_weights(found):
    assert equal_bits(found[0][""]["hsdp"]["state"]["full"], found[0][""]["hsdp"]["state"]["model"])


def passed_on(rank: int, folder: str) -> None:
    """Load what the replicas saved, and save it unchanged."""
    for kind, trained in PASSED_ON:
        backend = engine_with_or_without_adapters(kind + trained, seed=2)
        config = config_of(folder, "hsdp" + trained)
        config.backend = ENGINES[kind]
        assert resume(config, backend) == 2
        save(backend, config_of(folder, f"{kind}_of_{dist.get_world_size()}{trained}", kind))


def opened_again(rank: int, folder: str) -> list[tuple[str, dict[str, Any]]]:
    """Load each checkpoint. Return what was trained in it (`""` or `ADAPTED`), and the loaded state."""
    found = []
    for kind, trained in PASSED_ON:
        reader = "hsdp" if kind == "fsdp2" else kind
        for through in (1, 2):
            config = config_of(folder, f"{kind}_of_{through}{trained}", reader)
            found.append((trained, opened(config, reader + trained)))
    for trained in ("", ADAPTED):
        found.append((trained, opened(config_of(folder, "hsdp" + trained, "hsdp"), "hsdp" + trained)))
    return found


@pytest.mark.parametrize("ranks", [4, 2])
def test_a_checkpoint_passes_through_fewer_ranks_and_back_unchanged(found, folder, ranks, tmp_path):
    """Four ranks load as two replicas of two shards, two ranks as two whole copies. ZeRO also loads adapters."""
    for through in (2, 1):
        if not config_of(str(folder), f"fsdp2_of_{through}").run_dir.exists():
            run_ranks(through, passed_on, str(folder), deadline_s=DEADLINE_S, join=tmp_path / str(through))
    for rank in run_ranks(ranks, opened_again, str(folder), deadline_s=DEADLINE_S, join=tmp_path / "join"):
        assert all(equal_bits(result, found[0][trained]["hsdp"]["state"]) for trained, result in rank)
