"""Adapters in peft's folders and in verl's rank files: merged by the formula, kept, or rejected."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf.checkpoint.__main__ import main
from rlhf.convert.layouts import open_source
from rlhf.errors import UserError
from rlhf.models.hf.source import Origin
from rlhf.storage.disk_errors import DamagedCheckpoint
from tests.support.adapted import (
    DOWN,
    PREFIX,
    Q,
    configure,
    factors_for,
    save_adapted_by_verl,
    save_adapter,
)
from tests.support.tiny_models import causal_lm


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("adapters") / "base"
    causal_lm("llama", folder)
    return folder


@pytest.fixture
def weights(base) -> dict[str, torch.Tensor]:
    return load_file(base / "model.safetensors")


@pytest.fixture
def factors(base) -> dict[str, torch.Tensor]:
    return factors_for(base)


@pytest.fixture
def adapter(base, tmp_path) -> Path:
    return save_adapter(base, tmp_path / "adapter")


def expected(weights: dict, factors: dict, name: str, scaling: float) -> torch.Tensor:
    a, b = (factors[f"{PREFIX}{name}.lora_{kind}.weight"] for kind in "AB")
    return weights[f"{name}.weight"] + (b @ a) * scaling


def merged(folder: Path, **origin: Any) -> dict[str, torch.Tensor]:
    source = open_source(Origin(folder, adapter="merge", **origin))
    return {name: source.read(name, 0, i.numel).view(i.shape) for name, i in source.contents.tensors.items()}


def test_merging_adds_the_adapter_to_the_base_weights(adapter, base, weights, factors):
    found = merged(adapter)
    assert found.keys() == weights.keys()
    changed = {f"{name}.weight": expected(weights, factors, name, 2.0) for name in (Q, DOWN)}
    for name, tensor in (weights | changed).items():
        assert torch.equal(found[name], tensor), name
    configure(adapter, base_model_name_or_path="nowhere/to-be-found")
    named = merged(adapter, model_files=base)
    assert all(torch.equal(named[name], found[name]) for name in found)


def test_ranges_of_a_merged_tensor_equal_slices_of_the_whole(adapter):
    found, source = merged(adapter), open_source(Origin(adapter, adapter="merge"))
    flat = found[f"{Q}.weight"].view(-1)
    for start, stop in ((0, 9), (9, 100), (100, len(flat)), (3, 4)):
        assert torch.equal(source.read(f"{Q}.weight", start, stop), flat[start:stop])


def test_scaling_is_peft_s(adapter, base, weights, factors):
    settings: dict[str, Any] = {"base_model_name_or_path": str(base), "alpha_pattern": {"layers.1.mlp.down_proj": 12}}
    configure(adapter, **settings)
    assert torch.equal(merged(adapter)[f"{Q}.weight"], expected(weights, factors, Q, 2.0))
    assert torch.equal(merged(adapter)[f"{DOWN}.weight"], expected(weights, factors, DOWN, 3.0))
    configure(adapter, use_rslora=True, **settings)
    assert torch.equal(merged(adapter)[f"{DOWN}.weight"], expected(weights, factors, DOWN, 6.0))


def test_fully_trained_modules_and_bfloat16_weights_are_merged(adapter, base, weights, factors):
    factors |= {f"{PREFIX}lm_head.weight": torch.randn(512, 16)}
    save_file({name: tensor.bfloat16() for name, tensor in factors.items()}, adapter / "adapter_model.safetensors")
    save_file({name: tensor.bfloat16() for name, tensor in weights.items()}, adapter / "model.safetensors")
    (adapter / "config.json").write_bytes((base / "config.json").read_bytes())
    configure(adapter, base_model_name_or_path=str(adapter))
    found = merged(adapter)
    halves = {name: tensor.bfloat16().float() for name, tensor in (weights | factors).items()}
    assert torch.equal(found["lm_head.weight"], factors[f"{PREFIX}lm_head.weight"].bfloat16())
    assert torch.equal(found[f"{Q}.weight"], expected(halves, halves, Q, 2.0).bfloat16())


def test_adapter_keep_writes_the_adapter_unchanged(adapter, factors, tmp_path, capsys):
    command = ["merge", "--local_dir", str(adapter), "--target_dir", str(tmp_path / "kept")]
    assert main(command) == 2
    output = capsys.readouterr().err
    assert "--adapter=merge" in output
    assert output.count("\n") == 1
    assert main([*command, "--adapter", "keep"]) == 0
    kept = load_file(tmp_path / "kept" / "adapter_model.safetensors")
    assert kept.keys() == factors.keys()
    assert all(torch.equal(kept[name], factors[name]) for name in kept)
    assert json.loads((tmp_path / "kept" / "adapter_config.json").read_text())["lora_alpha"] == 8
    assert not (tmp_path / "kept" / "config.json").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_dora": True}, "has lora_A, lora_B of .* needs lora_A, lora_B, lora_magnitude_vector"),
        ({"peft_type": "IA3"}, "peft_type=IA3, which is not merged here"),
        # Names and shapes equal plain LoRA's, but a plain merge would give another model than peft's.
        ({"init_lora_weights": "pissa"}, "init_lora_weights=pissa, which is not merged here"),
        (
            {"alora_invocation_tokens": [5], "lora_bias": True},
            r"alora_invocation_tokens=\[5\], lora_bias=True, which is not merged here",
        ),
        ({"lora_alpha": float("nan")}, "lora_alpha=nan and alpha_pattern=None, which give .* no scale"),
        ({"lora_alpha": None}, "lora_alpha=None"),
        ({"lora_alpha": 10**400}, "which give .* no scale"),
        ({"alpha_pattern": {"(": 2}}, r"alpha_pattern=\{'\(': 2\}, which give .* no scale"),
        ({"alpha_pattern": {"(q)+_proj": 2}}, "which give .* no scale. A pattern may have up to 3 of"),
        ({"alpha_pattern": {".*.*.*.*x": 2}}, "which give .* no scale"),
        ({"alpha_pattern": [3]}, r"alpha_pattern=\[3\], which give"),
        ({"base_model_name_or_path": None}, "does not name a base model. Set --hf_model_path"),
        ({"base_model_name_or_path": "/nowhere"}, "base_model_name_or_path=/nowhere"),
    ],
)
def test_an_adapter_that_cannot_be_merged_is_an_error(settings, message, adapter, base):
    configure(adapter, **{"base_model_name_or_path": str(base)} | settings)
    with pytest.raises(UserError, match=message):
        merged(adapter)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({f"{Q}.lora_B": None}, r"has lora_A of model\.layers\.0\.self_attn\.q_proj\.weight"),
        ({f"{Q}.lora_B": torch.ones(9, 4)}, r"does not fit this base: .*q_proj\.weight has shape \(16, 16\) there"),
        (
            {"model.other.lora_A": torch.ones(4, 4), "model.other.lora_B": torch.ones(4, 4)},
            "other.weight is missing",
        ),
        (
            {f"{Q}.lora_magnitude_vector": torch.ones(4)},
            r"has lora_A, lora_B, lora_magnitude_vector of .* needs lora_A",
        ),
        ({f"{Q}.lora_other": torch.ones(4)}, "an unsupported part of an adapter"),
    ],
)
def test_an_adapter_of_another_base_is_refused(change, message, adapter, factors):
    factors |= {f"{PREFIX}{name}.weight": tensor for name, tensor in change.items()}
    kept = {name: tensor for name, tensor in factors.items() if tensor is not None}
    save_file(kept, adapter / "adapter_model.safetensors")
    with pytest.raises(UserError, match=message):
        merged(adapter)


@pytest.fixture
def of_verl(base, tmp_path) -> Path:
    return save_adapted_by_verl(base, tmp_path / "actor")


def test_an_adapter_in_verl_rank_files_is_merged_or_kept(of_verl, base, weights, factors):
    with pytest.raises(UserError, match="--adapter=merge to merge"):
        open_source(Origin(of_verl))
    found = merged(of_verl)
    assert found.keys() == weights.keys()
    assert torch.equal(found[f"{DOWN}.weight"], expected(weights, factors, DOWN, 2.0))
    kept = open_source(Origin(of_verl, adapter="keep"))
    assert kept.contents.tensors.keys() == factors.keys()
    assert kept.contents.adapter is not None
    assert kept.contents.adapter["target_modules"] == ["down_proj", "q_proj"]
    # A state dict without the base's weights, as verl's `save_lora_only` makes it.
    state = torch.load(of_verl / "model_world_size_1_rank_0.pt", weights_only=True)
    only = {name: tensor for name, tensor in state.items() if "lora_" in name}
    torch.save(only, of_verl / "model_world_size_1_rank_0.pt")
    with pytest.raises(UserError, match=r"no base model .* Set --hf_model_path"):
        merged(of_verl)
    again = merged(of_verl, model_files=base)
    assert all(torch.equal(again[name], found[name]) for name in found)
    (of_verl / "lora_train_meta.json").unlink()
    os.mkfifo(of_verl / "lora_train_meta.json")
    with pytest.raises(DamagedCheckpoint, match=r"lora_train_meta\.json lacks r or lora_alpha"):
        merged(of_verl, model_files=base)
    (of_verl / "lora_train_meta.json").unlink()
    with pytest.raises(UserError, match=r"lacks lora_train_meta\.json"):
        merged(of_verl, model_files=base)
