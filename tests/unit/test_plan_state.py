"""Plan of weights, gradients and optimizer: against real models, on the meta device and under FSDP2 on 1 to 4 ranks."""

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rlhf.backends import deepspeed, fsdp2
from rlhf.backends.fsdp2 import Fsdp2Backend, shard, stays_plain
from rlhf.backends.training import Training
from rlhf.config import BackendConfig, Config, OptimConfig
from rlhf.errors import UserError
from rlhf.models.config_check import check_policy
from rlhf.models.folder_check import check_folder
from rlhf.models.loading import ModelSource, ModelStart, load_model_config, load_value_model
from rlhf.models.skeleton import cast_parameters
from rlhf.planning.memory_plan import Models, Target, memory_plan
from rlhf.planning.meta_shapes import shapes_from_config
from rlhf.planning.model_shapes import HEAD, ROOT, ModelShapes, read_config, shapes_from_files
from rlhf.planning.remedies import changed_config
from rlhf.planning.training_state import frozen_state, sharded, trained_state
from rlhf.planning.zero_shares import ZeroShares
from tests.support.fake_ranks import fake_process_group
from tests.support.numeric_ranks import single_rank
from tests.support.tiny_models import EXPERTS, causal_lm, tiny_config

TIED = [(name, tied) for name in ("llama", "qwen2", "qwen3", "gemma3_text", "gpt2") for tied in (True, False)]
TIED += [(name, False) for name in EXPERTS]


def shapes(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def local_bytes(tensors) -> int:
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)


@pytest.mark.parametrize(("name", "tied"), TIED)
def test_shapes_are_the_models(name, tied, tmp_path):
    causal_lm(name, tmp_path, tie_word_embeddings=tied)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(name, tie_word_embeddings=tied))
    by_headers, by_config = shapes_from_files(str(tmp_path)), shapes_from_config("model.path", str(tmp_path))
    assert by_headers is not None
    assert by_config.weights == shapes(model)
    assert sorted(by_headers.weights.values()) == sorted(by_config.weights.values())
    text = model.config.get_text_config()
    for found in (by_headers, by_config):
        assert found.count == sum(p.numel() for p in model.parameters())
        assert (found.vocabulary, found.hidden) == (text.vocab_size, text.hidden_size)
        assert (len(found.layers), found.heads) == (text.num_hidden_layers, text.num_attention_heads)
        assert found.has_own_head is not tied


@pytest.mark.parametrize(("name", "tied"), [("llama", False), ("gemma3_text", True), ("gpt2", True)])
def test_a_critic_has_one_value_in_the_place_of_the_head(name, tied, tmp_path):
    causal_lm(name, tmp_path, tie_word_embeddings=tied)
    source = ModelSource("critic.path", str(tmp_path))
    model = load_value_model(ModelStart(source, tmp_path, load_model_config(source, tmp_path)))
    found = shapes_from_files(str(tmp_path))
    assert found is not None
    assert sorted(found.with_value_head().weights.values()) == sorted(shapes(model).values())


@pytest.mark.parametrize(("ranks", "replicas"), [(1, 1), (2, 1), (2, 2), (3, 1), (4, 1), (4, 4)])
@pytest.mark.parametrize(("name", "tied"), [("llama", False), ("qwen2", True), ("gpt2", True)])
def test_a_rank_holds_what_the_plan_says(name, tied, ranks, replicas):
    model = AutoModelForCausalLM.from_config(tiny_config(name, tie_word_embeddings=tied))
    architecture = ModelShapes(shapes(model), model.config.to_dict())
    config = BackendConfig(dp_replicate=replicas)
    planned = trained_state(architecture, config, ranks)
    with fake_process_group(ranks):
        options = {"grad_clip": 1.0, "total_optimizer_steps": 1}
        backend = Fsdp2Backend(model, config, torch.device("cpu"), Training(OptimConfig(), **options))
        loss = model(input_ids=torch.ones(1, 4, dtype=torch.int64), use_cache=False).logits.sum()
        backend.backward(loss)
        parameters = list(backend.module.parameters())
        moments = [t for p in parameters for key, t in backend.optimizer.state[p].items() if key != "step"]
        assert local_bytes(parameters) == planned.weights
        assert local_bytes(p.grad for p in parameters if p.grad is not None) == planned.gradients
        assert local_bytes(moments) == planned.optimizer


def test_replicas_are_sharded_over_fewer_ranks():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    architecture = ModelShapes(shapes(model), model.config.to_dict())
    frozen = partial(frozen_state, dtype="float32")
    for planned in (trained_state, frozen):
        replicas, plain = BackendConfig(dp_replicate=3), BackendConfig()
        assert planned(architecture, replicas, ranks=6) == planned(architecture, plain, ranks=2)


def test_replicas_need_the_memory_of_one_rank_and_a_bucket_of_gradients():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    architecture = ModelShapes(shapes(model), model.config.to_dict())
    whole, alone = BackendConfig(dp_replicate=2), BackendConfig()
    bucket = {"step_temporaries": 4 * architecture.count}
    assert trained_state(architecture, whole, 2) == replace(trained_state(architecture, alone, 1), **bucket)
    assert frozen_state(architecture, whole, "float32", 2) == frozen_state(architecture, alone, "float32", 1)


@pytest.mark.parametrize(
    ("settings", "target", "replicas"),
    [
        ({}, {}, 2),
        ({"backend.dp_replicate": 1}, {}, 1),
        ({}, {"memory": None}, 1),
        ({}, {"ranks": 4}, 1),  # on two machines
        ({}, {"cuda": True}, 1),
        ({"backend.autocast": "bfloat16"}, {}, 1),
        ({"backend.name": "deepspeed"}, {}, 1),
        ({"model.lora.enabled": True}, {}, 2),
        ({"model.lora.enabled": True, "model.lora.base_dtype": "bfloat16"}, {}, 1),
    ],
)
def test_dp_replicate_null_is_a_replica_per_rank_on_one_machine_of_cpus(settings, target, replicas):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    models = Models(ModelShapes(shapes(model), model.config.to_dict()))
    config = Config()
    config.trainer.nproc = 2
    plan = memory_plan(changed_config(config, settings), models, replace(Target(False, 2, 1 << 40), **target))
    assert plan.replicas == replicas


def test_dp_replicate_null_needs_twice_the_planned_memory_for_replicas():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    models = Models(ModelShapes(shapes(model), model.config.to_dict()))
    config = Config()
    config.trainer.nproc = 2
    needed = memory_plan(config, models, Target(False, 2, 1 << 40)).peak.total
    found = [memory_plan(config, models, Target(False, 2, memory)).replicas for memory in (2 * needed, 2 * needed - 1)]
    assert found == [2, 1]


@pytest.mark.parametrize(("top_k", "kept"), [(2, 2), (2048, 512)])
def test_the_plan_counts_sampling_masks(top_k, kept):
    """Two copies of 256 samples: rollout and training batch on the device, sample and its encoding on the host."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    models = Models(ModelShapes(shapes(model), model.config.to_dict()))
    assert models.policy.vocabulary == 512
    plain = changed_config(Config(), {"rollout.n": 4, "data.train_batch_size": 64, "data.max_response_length": 100})
    masked = changed_config(plain, {"rollout.sampling_mask": True, "rollout.top_k": top_k})
    before, after = (memory_plan(config, models, Target(True, 1, 1 << 40)) for config in (plain, masked))
    tokens = 256 * 100
    assert sum(after.host.values()) - sum(before.host.values()) == 2 * 4 * (1 + kept) * tokens
    on_device = [new.total - old.total for new, old in zip(after.phases, before.phases, strict=True)]
    assert on_device == [2 * 4 * kept * tokens] * len(after.phases)
    before, after = (memory_plan(config, models, Target(False, 1, 1 << 40)) for config in (plain, masked))
    assert after.peak.total - before.peak.total == 2 * 4 * (1 + 2 * kept) * tokens


def test_one_rank_gathers_nothing_unless_passes_round_the_weights():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    architecture = ModelShapes(shapes(model), model.config.to_dict())
    for autocast, is_plain in (("none", True), ("bfloat16", False)):
        config = BackendConfig(autocast=autocast)
        states = [trained_state(architecture, config, 1), frozen_state(architecture, config, "float32", 1)]
        with single_rank():
            assert stays_plain(model, config) == is_plain
        assert [state.gathered == 0 for state in states] == [is_plain] * 2
        assert trained_state(architecture, config, 2).gathered


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_frozen_model_has_no_gradients_or_optimizer_state(dtype):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    architecture = ModelShapes(shapes(model), model.config.to_dict())
    planned = frozen_state(architecture, BackendConfig(), dtype, 2)
    cast_parameters(model, getattr(torch, dtype))
    with fake_process_group(2):
        assert local_bytes(shard(model, BackendConfig(), torch.device("cpu")).parameters()) == planned.weights
    assert planned.optimizer == planned.gradients == 0


def test_nested_no_split_modules_are_sharded_correctly(monkeypatch):
    """Earlier, Mamba's mixer was sharded before the layer that contains it, and the first pass failed."""
    monkeypatch.setattr(fsdp2, "stays_plain", lambda *_: False)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 20, "state_size": 4}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mamba", **sizes))
    assert {"MambaBlock", "MambaMixer"} <= set(model._no_split_modules)
    ids = torch.arange(8).view(1, 8)
    expected = model(input_ids=ids, use_cache=False).logits
    with single_rank():
        found = shard(model, BackendConfig(), torch.device("cpu"))(input_ids=ids, use_cache=False).logits
        assert torch.equal(found, expected)
        units = {name for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    assert units == {"", "backbone.layers.0", "backbone.layers.1"}


def test_planned_units_equal_the_units_that_fsdp_gathers():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("qwen3"))
    units = {name: dict(weights) for name, weights in ModelShapes(shapes(model), {}).units.items()}
    units[ROOT] |= units.pop(HEAD)
    layers = [dict(layer.named_parameters()) for layer in model.model.layers]
    sizes = {name: sum(map(math.prod, weights.values())) for name, weights in units.items()}
    assert sizes == {ROOT: sizes[ROOT]} | {
        f"model.layers.{i}": sum(p.numel() for p in layer.values()) for i, layer in enumerate(layers)
    }


def test_each_zero_stage_shards_more_state():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    architecture, count = (
        ModelShapes(shapes(model), model.config.to_dict()),
        sum(p.numel() for p in model.parameters()),
    )

    def kept(stage: int, ranks: int) -> int:
        config = BackendConfig(name="deepspeed", zero_stage=stage, autocast="bfloat16")
        state = trained_state(architecture, config, ranks)
        buffer = 4 * count if stage == 3 else 0
        return state.weights + state.optimizer + state.gradients + state.permanent - buffer

    assert count % 4 == 0
    # Weights in bfloat16, master weights and two moments; gradients in bfloat16. Stage 1 also keeps their sum in
    # float32, and from stage 2 on only the sum remains.
    assert [kept(stage, 4) for stage in range(4)] == [
        (2 + 12 + 2) * count,
        (2 + 12 // 4 + 2 + 4) * count,
        (2 + 12 // 4 + 1) * count,
        (2 / 4 + 12 // 4 + 1) * count,
    ]


def test_the_bucket_is_no_larger_than_what_is_trained():
    """With adapters, the bucket once was as large as the frozen base."""
    config = BackendConfig(name="deepspeed", zero_stage=2)
    zero = deepspeed._settings(config, 1.0, [(90_000, False), (10_000, True)])["zero_optimization"]
    assert zero["reduce_bucket_size"] == ZeroShares(10_000, 2, 4, 1).bucket // 4 == 10_000
    assert zero["stage3_param_persistence_threshold"] == 1000


def test_a_tied_head_that_the_files_have_as_well_counts_once(tmp_path: Path):
    model = causal_lm("qwen2", tmp_path, tie_word_embeddings=False)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    found = shapes_from_files(str(tmp_path))
    assert found is not None
    assert found.count == sum(p.numel() for p in model.parameters()) - model.lm_head.weight.numel()


@pytest.mark.parametrize(
    ("given", "inner"), [([9, 11, 9], 11), ([], 28), ("wide", 28), ({"a": 1}, 28), (math.inf, 28), (-3, 28), (12, 12)]
)
def test_sizes_in_a_config_may_be_lists_and_invalid_sizes_are_ignored(tmp_path: Path, given: Any, inner: int):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "a", "hidden_size": 7, "intermediate_size": given}))
    header = b'{"x.layers.0.w": {"shape": [2, 7]}, "e": {"shape": [5, 7]}}'
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    found = shapes_from_files(str(tmp_path))
    assert found is not None
    assert found.inner == inner


def test_a_too_deeply_nested_config_is_rejected(tmp_path: Path):
    (tmp_path / "config.json").write_text("[" * 100_000)
    assert read_config(tmp_path) is None
    with pytest.raises(UserError, match=r"config\.json is not JSON: maximum recursion depth"):
        check_folder("model.path", str(tmp_path))
    check_policy(str(tmp_path), trust_remote_code=False, max_prompt=1, max_response=1)


def test_a_multimodal_file_is_read_by_its_text_part(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "a", "text_config": {"hidden_size": 7}}')
    header = b'{"x.layers.0.w": {"shape": [2, 7]}, "e": {"shape": [5, 7]}}'
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    found = shapes_from_files(str(tmp_path))
    assert found is not None
    assert (found.hidden, found.vocabulary, found.count) == (7, 5, 49)
    assert sharded(found.weights, 2) == 7 + 3 * 7
