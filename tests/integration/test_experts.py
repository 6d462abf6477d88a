"""Mixtures of experts: training has all experts in one tensor, exported folders have a tensor for each expert."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlhf.backends import build_backend
from rlhf.backends.base import TrainingBackend
from rlhf.backends.training import Training
from rlhf.checkpoint.__main__ import main
from rlhf.config import Config, RolloutConfig
from rlhf.models import weights
from rlhf.models.loading import ModelSource, ModelStart, hf_files, load_model, load_model_config
from rlhf.models.model_files import find_files
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.gloo import GlooTransport
from rlhf.rollout.embedded import build_embedded_engine
from tests.support.checkpoints import (
    begin_at,
    equal_bits,
    make_checkpointer,
    make_config,
    resume,
    run_ranks,
    save_steps,
)
from tests.support.engines import CPU, ENGINES, NEEDS_DEEPSPEED, OPTIM, gathered, state_of, train
from tests.support.tiny_models import mixture, tiny_tokenizer

KINDS = ["fsdp2", "zero2", "zero3"]
FUSED = "model.layers.1.mlp.experts.gate_up_proj"
DEADLINE_S = 300


@pytest.fixture(scope="module", params=["mixtral", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def model(request, tmp_path_factory) -> Path:
    """The folder of a mixture of experts."""
    folder = tmp_path_factory.mktemp(request.param)
    mixture(request.param, folder / "model")
    return folder / "model"


def engine_of(kind: str, model: Path, scratch: Path) -> TrainingBackend:
    """Return a training engine with the weights of `model`, loaded by shards."""
    source, coordinator = ModelSource("model.path", str(model)), Coordinator(GlooTransport())
    hf_config = load_model_config(source, model)
    files = find_files(source, "auto", coordinator, CPU, scratch)
    loaded = weights.load(files, hf_config, partial(load_model, ModelStart(source, model, hf_config)), coordinator, CPU)
    assert any(p.is_meta for p in loaded.model.parameters())
    small = hf_files(hf_config, tiny_tokenizer(), None)
    options: dict[str, Any] = {"grad_clip": 1.0, "total_optimizer_steps": 20, "hf_files": small}
    backend = build_backend(loaded.model, ENGINES[kind], CPU, Training(OPTIM, **options))
    loaded.fill(backend.model_shards())
    backend.after_load()
    return backend


def config_of(model: Path, kind: str) -> Config:
    config = make_config(model.parent / kind)
    config.backend, config.model.path = ENGINES[kind], str(model)
    config.checkpoint.contents = ["model", "optimizer", "extra", "hf_model"]
    return config


def handed_over(backend: TrainingBackend, model: Path) -> bool:
    """Return whether the embedded engine has the bfloat16 weights that it received.

    `update_weights` compares digests of the weights, too.
    """
    plain = AutoModelForCausalLM.from_pretrained(model)
    engine = build_embedded_engine(plain, tiny_tokenizer(), RolloutConfig(dtype="bfloat16"))
    engine.update_weights(lambda: backend.full_tensors(engine.dtype), 1)
    cast = {name: tensor.bfloat16() for name, tensor in backend.full_tensors()}
    return equal_bits({name: p.detach() for name, p in engine.model.named_parameters()}, cast)


def lives(rank: int, model: Path) -> dict[str, dict[str, Any]]:
    """Return whether weight sync, resume, a load in another engine and a load of the export keep all bits."""
    torch.use_deterministic_algorithms(True)
    results: dict[str, dict[str, Any]] = {}
    for kind in KINDS:
        backend = engine_of(kind, model, model.parent / f"scratch{rank}")
        config = config_of(model, kind)
        save_steps(config, backend, 1)
        train(backend, 0)
        results[kind] = {"engine holds": handed_over(backend, model)}
        save_steps(config, backend, 2)
        saved = state_of(backend)
        train(backend, 1)
        other = engine_of(kind, model, model.parent / f"scratch{rank}")
        assert resume(config, other) == 2
        train(other, 1)
        results[kind]["resumed"] = equal_bits(state_of(other), state_of(backend))
        follower = engine_of(KINDS[KINDS.index(kind) - 1], model, model.parent / f"scratch{rank}")
        assert resume(config, follower) == 2
        moved = state_of(follower)
        results[kind]["resharded"] = all(equal_bits(moved[part], saved[part]) for part in ("model", "optimizer"))
        begin_at(config, config.run_dir / "global_step_2", ["hf_model"])
        train(follower, 3)
        resume(config, follower)
        results[kind]["from files"] = equal_bits(gathered(follower.model_shards()), saved["model"])
    return results


@pytest.fixture(scope="module")
def found(model) -> list[dict[str, dict[str, Any]]]:
    return run_ranks(2, lives, model, deadline_s=DEADLINE_S, join=model.parent / "join")


@NEEDS_DEEPSPEED
@pytest.mark.parametrize("what", ["engine holds", "resumed", "resharded", "from files"])
def test_every_engine_saves_and_loads_experts_bit_for_bit(found, what):
    for of_rank in found:
        assert {kind: of_rank[kind][what] for kind in KINDS} == dict.fromkeys(KINDS, True)


def tensors(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


@NEEDS_DEEPSPEED
def test_an_untrained_export_equals_the_loaded_folder(found, model):
    for kind in KINDS:
        steps = config_of(model, kind).run_dir
        assert equal_bits(tensors(steps / "global_step_1" / "actor" / "huggingface"), tensors(model))
        trained = steps / "global_step_2" / "actor" / "huggingface"
        assert tensors(trained).keys() == tensors(model).keys()
        assert not equal_bits(tensors(trained), tensors(model))
        AutoModelForCausalLM.from_pretrained(trained)


@NEEDS_DEEPSPEED
def test_verbs_write_and_read_a_tensor_for_each_expert(found, model, tmp_path, capsys):
    checkpoint = config_of(model, "fsdp2").run_dir / "global_step_2"
    trained = checkpoint / "actor" / "huggingface"
    for arguments in (
        ["export", checkpoint, tmp_path / "export"],
        ["export", checkpoint, tmp_path / "cast", "--dtype", "bfloat16"],
        ["merge", "--local_dir", checkpoint, "--target_dir", tmp_path / "merge"],
        ["convert", checkpoint, tmp_path / "dcp", "--to", "dcp"],
        ["convert", tmp_path / "dcp", tmp_path / "convert", "--to", "hf", "--hf_model_path", model],
    ):
        assert main([*map(str, arguments)]) == 0, capsys.readouterr()
    for name in ("export", "merge", "convert"):
        assert equal_bits(tensors(tmp_path / name), tensors(trained)), name
    assert equal_bits(tensors(tmp_path / "cast"), {n: t.bfloat16() for n, t in tensors(trained).items()})
    capsys.readouterr()
    for tested in (checkpoint, tmp_path / "dcp", tmp_path / "merge"):
        assert main([*map(str, ("test", "--local_dir", tested, "--test_hf_dir", trained, "--json"))]) == 0
        verdict = json.loads(capsys.readouterr().out)
        assert (verdict["equal"], verdict["logits"]) == (True, 0.0)
        assert verdict["tensors"] == len(tensors(model))


def imported(rank: int, model: Path) -> dict[str, Tensor]:
    """Return the weights of an engine that starts from an imported folder."""
    backend, config = engine_of("fsdp2", model, model.parent / f"scratch{rank}"), config_of(model, "fsdp2")
    begin_at(config, model.parent / "start" / "global_step_3", ["model"])
    make_checkpointer(config, backend).resume()
    return gathered(backend.model_shards())


@NEEDS_DEEPSPEED
def test_a_folder_with_a_tensor_for_each_expert_is_imported(found, model):
    trained = config_of(model, "fsdp2").run_dir / "global_step_2" / "actor" / "huggingface"
    start = model.parent / "start" / "global_step_3"
    assert main(["import", str(trained), str(start)]) == 0
    assert equal_bits(tensors(start / "actor" / "huggingface"), tensors(trained))
    whole = dict(AutoModelForCausalLM.from_pretrained(trained).named_parameters())
    assert FUSED in whole
    for state in run_ranks(2, imported, model, deadline_s=DEADLINE_S, join=model.parent / "join-import"):
        assert equal_bits(state, {name: p.detach() for name, p in whole.items()})
