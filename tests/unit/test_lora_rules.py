"""Adapter settings, bases and folders that are rejected before any weight is loaded."""

import json
import os
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rlhf.assemble.model_sources import ResolvedModel
from rlhf.config import Config, FrozenFsdpConfig, LoraConfig
from rlhf.config.rules import backend_rules
from rlhf.config.rules import lora_rules as rules
from rlhf.config.rules.lora_rules import lora_problems
from rlhf.config.rules.validate import validate
from rlhf.errors import UserError
from rlhf.models.adapter_folder import check_adapter_folder
from rlhf.models.adapter_layers import Adapters, add_adapters, target_names
from rlhf.models.loading import ModelSource
from rlhf.models.model_files import ModelFiles
from tests.support.refusals import facts, says, user_error
from tests.support.tiny_updates import tiny_qwen2


def config_of(**lora: Any) -> Config:
    config = Config()
    config.model.path = config.data.train_files = "org/name"
    config.model.lora = LoraConfig(**{"enabled": True} | lora)
    return config


def config_error(config: Config) -> str:
    return user_error(validate, config, {})


def test_plain_settings_pass():
    validate(config_of(), {})


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"rank": 0}, ["model.lora.rank=0", "1"]),
        ({"dropout": 1.0}, ["model.lora.dropout=1.0", "0.9"]),
        ({"base_dtype": "float16"}, ["model.lora.base_dtype=float16", "float32, bfloat16"]),
        ({"enabled": False, "rank": 8}, ["model.lora.rank=8", "model.lora.enabled=true"]),
        ({"target_modules": "q_proj"}, ["model.lora.target_modules='q_proj'", "all-linear"]),
        ({"target_modules": []}, ["model.lora.target_modules=[]", "all-linear"]),
    ],
)
def test_invalid_lora_settings_are_rejected(lora, message):
    says(config_error(config_of(**lora)), *message)


def test_lora_settings_that_conflict_with_other_settings_are_rejected():
    config = config_of(use_dora=True, base_dtype="bfloat16")
    config.actor.use_kl_loss = True
    config.ref.update_freq, config.checkpoint.contents = 5, ["hf_model"]
    config.backend.name, config.backend.zero_stage = "deepspeed", 3
    lines = config_error(config).splitlines()
    says(lines[0], "ref.update_freq=5", "model.lora.enabled=true")
    says(lines[1], "hf_model", "add model")
    says(lines[2], "backend.autocast=none", "model.lora.base_dtype=null")
    says(lines[3], "model.lora.use_dora=true", "backend.zero_stage=2")
    config.backend.autocast, config.model.lora.base_dtype = "bfloat16", None
    assert len(config_error(config).splitlines()) == 3
    config.ref.fsdp_config.model_dtype = "bfloat16"
    says(config_error(config), "ref.fsdp_config.model_dtype", "model.lora.base_dtype")
    config.ref.fsdp_config = FrozenFsdpConfig(param_offload=True)
    says(config_error(config), "ref.fsdp_config.param_offload", "actor.fsdp_config.param_offload")
    assert "model_dtype" not in config_error(config)


def test_peft_missing_or_old(monkeypatch):
    monkeypatch.setattr(rules, "PEFT", "99")
    says(config_error(config_of()), "pip install 'peft>=99'")
    validate(config_of(enabled=False), {})

    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(backend_rules, "version", absent)
    says(config_error(config_of()), "model.lora.enabled=true", "not installed", "pip install 'peft>=99'")


def targets(**lora: Any) -> str:
    return user_error(target_names, tiny_qwen2(), LoraConfig(**{"enabled": True, "rank": 4} | lora))


def test_target_modules_must_exist_in_the_model():
    names = target_names(
        tiny_qwen2(), LoraConfig(rank=4, target_modules=["q_proj", "mlp.up_proj"], exclude_modules=["0.mlp.up_proj"])
    )
    assert names == [f"model.layers.{n}" for n in ("0.self_attn.q_proj", "1.mlp.up_proj", "1.self_attn.q_proj")]
    says(targets(target_modules=["q_proj", "qproj"]), "qwen2", "'qproj'", "q_proj", "down_proj")
    says(targets(exclude_modules=["nope"]), "'nope'")
    assert "excludes every layer" in targets(target_modules=["q_proj"], exclude_modules=["self_attn.q_proj"])
    says(targets(target_modules=["embed_tokens"]), "model.embed_tokens", "Embedding")
    says(targets(target_modules=["lm_head"]), "lm_head", "head")


def test_a_lora_rank_above_every_layer_size_is_rejected():
    says(targets(rank=17), "model.lora.rank=17", "16", "model.layers.0.mlp.down_p")
    says(targets(rank=9, target_modules=["k_proj"]), "model.lora.rank=9", "model.lora.rank=8")
    # The rank may exceed the size of some layers: small ones, such as experts' gates, are common.
    assert len(target_names(tiny_qwen2(), LoraConfig(rank=16))) == 2 * 7


def tiny_moe(*dense: int) -> PreTrainedModel:
    config = Qwen3MoeConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        mlp_only_layers=list(dense),
    )
    with torch.device("meta"):
        return Qwen3MoeForCausalLM(config)


def test_fused_experts_get_no_adapters():
    """By itself, peft applies all-linear to experts and their router, too, and names of dense layers to experts."""
    model = tiny_moe()
    add_adapters(model, LoraConfig(rank=4), torch.float32)
    assert {name for name, p in model.named_parameters() if p.requires_grad and ".mlp." in name} == set()
    assert len([p for p in model.parameters() if p.requires_grad]) == 2 * 2 * 4
    message = user_error(target_names, tiny_moe(), LoraConfig(target_modules=["experts"]))
    says(message, "model.layers.0.mlp.experts", "Qwen3MoeExperts")
    message = user_error(add_adapters, tiny_moe(0), LoraConfig(rank=4), torch.float32)
    says(message, "experts", "qwen3_moe", "model.layers.0.mlp.")
    dense = ["mlp.gate_proj", "up_proj", "down_proj"]
    add_adapters(tiny_moe(0), LoraConfig(rank=4, exclude_modules=dense), torch.float32)


@pytest.fixture
def folders(tmp_path) -> tuple[Path, Path]:
    """Write a base and its adapter, with the files that the checks read."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    for folder in (base, adapter):
        folder.mkdir()
    (base / "config.json").write_text('{"model_type": "qwen2"}')
    save_file({"a": torch.zeros(2)}, adapter / "adapter_model.safetensors")
    write(adapter, base)
    return base, adapter


def write(adapter: Path, base: Path, **settings: Any) -> None:
    config = {"peft_type": "LORA", "r": 32, "lora_alpha": 32, "bias": "none", "base_model_name_or_path": str(base)}
    (adapter / "adapter_config.json").write_text(json.dumps(config | settings))


def start(base: Path, adapter: Path, **lora: Any) -> str:
    return user_error(check_adapter_folder, LoraConfig(enabled=True, path=str(adapter), **lora), str(base))


def test_adapter_folder(folders, tmp_path):
    base, adapter = folders
    check_adapter_folder(LoraConfig(enabled=True, path=str(adapter)), str(base))
    says(start(base, tmp_path / "none"), f"model.lora.path={tmp_path / 'none'}", "no such folder")
    check_adapter_folder(LoraConfig(enabled=True, path=str(tmp_path / "none")), str(base), needed=False)
    says(start(base, base), "no adapter_config.json")
    message = start(base, adapter, rank=16, use_dora=True)
    says(message, "rank 32", "16", "use_dora False", "True", "model.lora.rank=32", "model.lora.use_dora=false")
    write(adapter, base, modules_to_save=["lm_head"], init_lora_weights="pissa")
    says(start(base, adapter), "init_lora_weights", "pissa", "modules_to_save", "lm_head")
    write(adapter, base, alora_invocation_tokens=[5, 7], use_qalora=True, arrow_config=None)
    says(start(base, adapter), "alora_invocation_tokens", "[5, 7]", "use_qalora")
    (adapter / "adapter_model.safetensors").unlink()
    says(start(base, adapter), "no adapter_model.safetensors")


def test_adapter_of_another_base(folders, tmp_path):
    base, adapter = folders
    copy, other = tmp_path / "copy", tmp_path / "other"
    for folder, content in ((copy, '{"model_type": "qwen2"}'), (other, "{}")):
        folder.mkdir()
        (folder / "config.json").write_text(content)
    check_adapter_folder(LoraConfig(enabled=True, path=str(adapter)), str(copy))
    says(start(other, adapter), f"model.path={other}", f"model.path={base}")
    write(adapter, Path("org/base"))
    with pytest.raises(UserError, match=facts("org/base", "model.path=org/other")):
        check_adapter_folder(LoraConfig(enabled=True, path=str(adapter)), "org/other")
    check_adapter_folder(LoraConfig(enabled=True, path=str(adapter)), str(base))  # the folder may be a copy of org/base


def test_a_truncated_adapter_is_rejected_before_the_base_is_loaded(folders):
    base, adapter = folders
    file = adapter / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    says(start(base, adapter), f"model.lora.path={adapter}", "adapter_model.safetensors")
    file.write_bytes(b"torn")
    says(start(base, adapter), f"model.lora.path={adapter}", "adapter_model.safetensors", "safetensors header")


def test_wrong_layers_and_shapes_are_rejected_before_the_base_is_loaded(folders):
    """The base's folder has no weights, so the checks cannot have loaded any."""
    base, adapter = folders
    model = tiny_qwen2(0)
    lora = LoraConfig(enabled=True, rank=4, target_modules=["q_proj"], path=str(adapter))
    source = ModelSource("model.path", str(base), None, False, "eager")
    found = ResolvedModel(ModelFiles(source, base, None, None, ""), model.config, PreTrainedTokenizerFast)
    add_adapters(model, lora, torch.float32)
    stored = {
        f"base_model.model.{name}": torch.zeros(p.shape)
        for name, p in Adapters.of(model).trained(model.named_parameters())
    }
    last, file = max(stored), adapter / "adapter_model.safetensors"
    expected = f"model.lora.path={adapter}", "adapter_model.safetensors"

    save_file(stored, file)
    found.check_adapters(lora)
    save_file(stored | {last: torch.zeros(8, 4)}, file)
    name, shape = last.removeprefix("base_model.model."), list(stored[last].shape)
    says(user_error(found.check_adapters, lora), *expected, name, "[8, 4]", str(shape))
    save_file(stored | {last: stored[last].to(torch.int8)}, file)
    says(user_error(found.check_adapters, lora), *expected, name, "I8", "F64, F32, F16, BF16")
    save_file({key: tensor for key, tensor in stored.items() if key != last}, file)
    says(user_error(found.check_adapters, lora), *expected, f"no {name}")


@pytest.mark.parametrize("named", ["~nobody-of-this-name/base", "a" * 5000, "\0", ["a", "list"]], ids=range(4))
def test_an_adapter_with_an_invalid_base_name_passes(folders, named):
    base, adapter = folders
    write(adapter, base, base_model_name_or_path=named)
    check_adapter_folder(LoraConfig(enabled=True, path=str(adapter)), str(base))


def test_a_pipe_instead_of_adapter_config_json_is_a_missing_file(folders):
    base, adapter = folders
    (adapter / "adapter_config.json").unlink()
    os.mkfifo(adapter / "adapter_config.json")
    says(start(base, adapter), "no adapter_config.json")


def test_suggested_rate():
    config = config_of()
    assert rules.suggested_rate(config) == pytest.approx(1e-5)
    config.actor.optim.lr = 3e-6
    assert rules.suggested_rate(config) is None


@pytest.mark.parametrize(
    ("lora", "rollout", "message"),
    [
        ({}, {"name": "embedded"}, ["rollout=vllm", "embedded"]),
        ({"use_dora": True}, {"name": "vllm"}, ["model.lora.use_dora=true"]),
        ({"rank": 600}, {"name": "vllm"}, ["512", "model.lora.rank=600"]),
        ({}, {"name": "vllm", "tensor_model_parallel_size": 2}, ["sharded over devices"]),
        ({}, {"name": "vllm_server", "tensor_model_parallel_size": 2}, ["sharded over devices"]),
    ],
)
def test_an_engine_that_cannot_serve_adapters_is_refused(lora, rollout, message):
    config = config_of(**lora)
    config.rollout.lora = "native"
    for name, value in rollout.items():
        setattr(config.rollout, name, value)
    lines = [line for line in lora_problems(config) if line.startswith("rollout.lora=native")]
    says(lines[0], *message, "rollout.lora=merged")


@pytest.mark.parametrize("engine", ["vllm", "vllm_server"])
def test_vllm_serves_adapters(engine):
    config = config_of()
    config.rollout.lora, config.rollout.name = "native", engine
    assert not any(line.startswith("rollout.lora=native") for line in lora_problems(config))


def test_adapter_settings_without_adapters_are_rejected():
    config = config_of(enabled=False)
    config.rollout.lora, config.checkpoint.hf_adapter = "native", "merge"
    lines = sorted(lora_problems(config))
    says(lines[0], "checkpoint.hf_adapter=merge", "model.lora.enabled=true")
    says(lines[1], "rollout.lora=native", "model.lora.enabled=true")
