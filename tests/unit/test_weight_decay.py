"""Weights that decay, compared with transformers' own list, and the resulting parameter groups."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer

from rlhf.backends.training import is_decayed, parameter_groups
from rlhf.config import OptimConfig
from tests.support.tiny_models import tiny_config
from tests.support.tiny_updates import tiny_qwen2, tiny_value_model


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3_text", "gpt2", "mistral"])
def test_the_same_weights_decay_as_in_transformers(name):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(name))
    expected = Trainer.get_decay_parameter_names(None, model)  # type: ignore[arg-type]
    found = [name for name, parameter in model.named_parameters() if is_decayed(name, tuple(parameter.shape))]
    assert set(found) == set(expected) & {name for name, _ in model.named_parameters()}
    assert 0 < len(found) < len(list(model.parameters()))


@pytest.mark.parametrize(
    ("name", "shape", "decayed"),
    [
        ("model.layers.0.self_attn.q_norm.weight", (4, 16), False),
        ("model.layers.0.mlp.experts.gate_up_proj_bias", (8, 64), False),
        ("model.layers.0.mlp.experts.gate_up_proj", (8, 16, 64), True),
        ("transformer.h.0.ln_1.weight", (16,), False),
        ("lm_head.weight", (64, 16), True),
        ("weight", (4, 4), True),
        ("norm.weight", (4, 4), False),
    ],
)
def test_norms_and_biases_of_other_shapes(name, shape, decayed):
    assert is_decayed(name, shape) is decayed


@pytest.mark.parametrize("model", [tiny_qwen2, tiny_value_model])
def test_each_trained_parameter_is_in_one_group(model):
    module = model()
    frozen = next(iter(module.parameters())).requires_grad_(False)
    decayed, others = parameter_groups(module, OptimConfig(weight_decay=0.1))
    assert "weight_decay" not in decayed
    assert others["weight_decay"] == 0
    named = dict(decayed["params"] + others["params"])
    assert named == {name: p for name, p in module.named_parameters() if p is not frozen}
    assert len(named) == len(decayed["params"]) + len(others["params"])


@pytest.mark.parametrize("optim", [OptimConfig(weight_decay=0.0), OptimConfig(decay_norm_and_bias=True)])
def test_equal_decay_gives_one_parameter_group(optim):
    (group,) = parameter_groups(tiny_qwen2(), optim)
    assert list(group) == ["params"]


def test_no_group_is_empty():
    (group,) = parameter_groups(torch.nn.Linear(2, 2, bias=False), OptimConfig(weight_decay=0.1))
    assert [name for name, _ in group["params"]] == ["weight"]
