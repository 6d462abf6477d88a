"""One rank trains without FSDP2: the same bits and the same files, and each loads the other's checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from rlhf.backends import build_backend, fsdp2
from rlhf.backends.base import TrainingBackend
from rlhf.backends.training import Training
from rlhf.config import BackendConfig, Config
from rlhf.models.adapter_start import copy_slice
from rlhf.models.skeleton import replace_parameters
from tests.support.adapted_engines import ADAPTED, adapted_engine, engine_with_or_without_adapters
from tests.support.checkpoints import equal_bits, make_checkpointer, make_config, resume, run_ranks
from tests.support.engines import CPU, ENGINES, OPTIM, make_engine, state_of, train
from tests.support.tiny_updates import tiny_gemma2, tiny_qwen2

DEADLINE_S = 120
WAYS = ("plain", "fsdp2")
KINDS = ("fsdp2", "fsdp2" + ADAPTED)
MODELS = {"tied": tiny_qwen2, "untied": tiny_gemma2}


def config_of(folder: str, name: str) -> Config:
    config = make_config(Path(folder, name))
    config.checkpoint.contents = ["model", "optimizer", "extra"]
    return config


def seen(backend: TrainingBackend, steps: range) -> dict[str, Any]:
    """Train, and return the metrics and all state."""
    figures = train(backend, *steps)
    return {"figures": figures, **state_of(backend), "full": {n: t.clone() for n, t in backend.full_tensors()}}


def loaded_later(model: PreTrainedModel) -> TrainingBackend:
    """Build an engine of a model on the meta device, and load its weights into the engine, as a run does."""
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    replace_parameters(model, lambda _, p: nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad))
    backend = build_backend(model, BackendConfig(), CPU, Training(OPTIM, 0.5, 20))
    for name, shard in backend.model_shards().items():
        if name in weights:
            copy_slice(shard, weights[name])
    backend.after_load()
    return backend


def both_ways(rank: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {way: {"units": {}} for way in WAYS}
    for way, kept in found.items():
        with pytest.MonkeyPatch.context() as patch:
            if way == "fsdp2":
                patch.setattr(fsdp2, "stays_plain", lambda *_: False)
            for kind in KINDS:
                backend = engine_with_or_without_adapters(kind, seed=1)
                kept["units"][kind] = sum(isinstance(m, FSDPModule) for m in backend.module.modules())
                kept[kind] = seen(backend, range(3))
                assert make_checkpointer(config_of(folder, way + kind), backend, 2).save(2) is not None
                kept[kind + "-end"] = seen(backend, range(3, 5))
            kept["recomputed"] = seen(adapted_engine("fsdp2", recompute=True), range(2))
            for name, model in MODELS.items():
                kept[name] = seen(loaded_later(model(3)), range(2))
    for way, other in (WAYS, WAYS[::-1]):
        with pytest.MonkeyPatch.context() as patch:
            if way == "fsdp2":
                patch.setattr(fsdp2, "stays_plain", lambda *_: False)
            for kind in KINDS:
                backend = engine_with_or_without_adapters(kind, seed=2)
                assert resume(config_of(folder, other + kind), backend) == 2
                found[way][kind + "-resumed"] = seen(backend, range(3, 5))
    found["rounded"] = fsdp2.stays_plain(tiny_qwen2(), ENGINES["fsdp2-bfloat16"])
    return found


def after_two_ranks(rank: int, folder: str) -> dict[str, Any]:
    """Load what one plain rank saved, and save it on these ranks. Return the state."""
    backend = make_engine("fsdp2", seed=2)
    assert resume(config_of(folder, "plainfsdp2"), backend) == 2
    assert make_checkpointer(config_of(folder, "two"), backend, 2).save(2) is not None
    return state_of(backend)


def opened_alone(rank: int, folder: str, name: str) -> dict[str, Any]:
    backend = make_engine("fsdp2", seed=3)
    assert resume(config_of(folder, name), backend) == 2
    return state_of(backend)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("plain")


@pytest.fixture(scope="module")
def found(folder) -> dict[str, Any]:
    (result,) = run_ranks(1, both_ways, str(folder), deadline_s=DEADLINE_S, join=folder / "join")
    return result


def test_one_rank_uses_fsdp2_only_if_passes_round_the_weights(found):
    assert set(found["plain"]["units"].values()) == {0}
    assert min(found["fsdp2"]["units"].values()) > 0
    assert found["rounded"] is False


def test_the_same_bits_in_gradients_norms_and_steps(found):
    """Tests whole models, adapters, recomputed activations, and tied or untied weights that are loaded later."""
    for part in (*KINDS, *(kind + "-end" for kind in KINDS), "recomputed", *MODELS):
        assert equal_bits(found["plain"][part], found["fsdp2"][part]), part


def test_each_resumes_from_the_others_checkpoint_with_the_same_bits(found):
    for way in WAYS:
        for kind in KINDS:
            assert equal_bits(found[way][kind + "-resumed"], found[way][kind + "-end"])


def test_the_same_files_are_saved(found, folder):
    for kind in KINDS:
        runs = [config_of(str(folder), way + kind).run_dir / "global_step_2" for way in WAYS]
        files = [{p.relative_to(run): p.read_bytes() for p in run.rglob("*.safetensors")} for run in runs]
        assert files[0]
        assert files[0] == files[1]


def test_one_rank_and_two_ranks_load_checkpoints_of_each_other(found, folder, tmp_path):
    state = {part: found["plain"]["fsdp2"][part] for part in ("model", "optimizer", "extra")}
    for rank in run_ranks(2, after_two_ranks, str(folder), deadline_s=DEADLINE_S, join=tmp_path / "two"):
        assert equal_bits(rank, state)
    (back,) = run_ranks(1, opened_alone, str(folder), "two", deadline_s=DEADLINE_S, join=tmp_path / "one")
    assert equal_bits(back, state)
