"""Weights with adapters, merged out of place, against peft's own merge."""

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from rlhf.convert.layouts import open_source
from rlhf.models.hf.source import Origin
from rlhf.models.merged_weight import KINDS, merged_weight
from tests.support.tiny_models import causal_lm, tiny_config

TARGETS = {"llama": ["q_proj", "down_proj", "embed_tokens"], "gpt2": ["c_attn", "c_fc", "wte"]}
VARIANTS = [("llama", {}), ("llama", {"use_rslora": True}), ("llama", {"use_dora": True}), ("gpt2", {})]
VARIANTS += [("gpt2", {"use_dora": True, "target_modules": ["c_attn", "c_fc"]})]


def adapted(model: nn.Module, name: str, **settings: Any) -> Any:
    """Add an adapter with random factors, and with magnitudes that are not the base's norms."""
    chosen = {"target_modules": TARGETS[name], "r": 4, "lora_alpha": 12, "fan_in_fan_out": name == "gpt2"} | settings
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(model, LoraConfig(init_lora_weights=False, **chosen))
    for key, parameter in model.named_parameters():
        if "magnitude" in key:
            parameter.data *= 1 + 0.1 * torch.rand_like(parameter)
    return model


@pytest.mark.parametrize(("name", "settings"), VARIANTS)
def test_merged_weights_equal_those_of_peft_to_the_bit(name, settings):
    torch.manual_seed(0)
    model = adapted(AutoModelForCausalLM.from_config(tiny_config(name)).float(), name, **settings)
    base = {key: parameter.clone() for key, parameter in model.named_parameters()}
    found = {}
    for key, module in model.named_modules():
        if hasattr(module, "lora_A"):
            parts = {kind: getattr(module, kind)["default"] for kind in KINDS if getattr(module, kind, None)}
            parts = {kind: getattr(part, "weight", part).detach() for kind, part in parts.items()}
            transposed = getattr(module, "fan_in_fan_out", False)
            weight = module.get_base_layer().weight.detach()
            merged = merged_weight(weight, parts, module.scaling["default"], transposed=transposed)
            found[key.removeprefix("base_model.model.")] = merged
    assert len(found) >= 4
    assert all(torch.equal(parameter, base[key]) for key, parameter in model.named_parameters())
    expected = copy.deepcopy(model).merge_and_unload().state_dict()
    for key, weight in found.items():
        assert torch.equal(weight, expected[f"{key}.weight"]), key


@pytest.mark.parametrize("settings", [{"use_dora": True, "target_modules": ["q_proj", "down_proj"]}, {}])
def test_a_folder_of_peft_is_merged_as_peft_does(settings, tmp_path: Path):
    causal_lm("llama", tmp_path / "base")
    model = adapted(AutoModelForCausalLM.from_pretrained(tmp_path / "base").float(), "llama", **settings)
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["use_dora"] is bool(settings)
    source = open_source(Origin(tmp_path / "adapter", tmp_path / "base", adapter="merge"))
    merged = {name: source.read(name, 0, i.numel).view(i.shape) for name, i in source.contents.tensors.items()}
    expected = model.merge_and_unload().state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in merged.items())
