"""Plan of a policy with adapters: the shapes equal peft's, and each recipe fits the GPU that it is for."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from transformers import AutoModelForCausalLM

from rlhf.compose import compose_config
from rlhf.config import BackendConfig, LoraConfig
from rlhf.config.library import Library
from rlhf.planning.adapter_state import adapted
from rlhf.planning.check import models_of, target_of
from rlhf.planning.device_defaults import Machine
from rlhf.planning.memory_plan import memory_plan
from rlhf.planning.meta_shapes import shapes_from_config
from tests.support.tiny_models import causal_lm, tiny_config

QWEN_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
ON_CARD = {"gsm8k_qwen_7b_lora": 80_000_000_000, "gsm8k_qwen_7b_lora_24gb": 24_000_000_000}


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"use_dora": True}, {"target_modules": ["q_proj", "c_attn"]}, {"exclude_modules": ["o_proj", "c_proj"]}],
)
def test_adapters_have_the_shapes_of_peft(name, settings, tmp_path):
    causal_lm(name, tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(name))
    peft = PeftConfig(r=4, **({"target_modules": "all-linear"} | settings))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(model, peft)
    expected = sorted(sorted(p.shape) for p in model.parameters() if p.requires_grad)
    found = adapted(shapes_from_config("model.path", str(tmp_path)), LoraConfig(rank=4, **settings), BackendConfig())
    assert sorted(map(sorted, found.trained.values())) == expected
    assert found.count == sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("recipe", ON_CARD)
def test_a_recipe_fits_the_card_that_it_is_for(recipe, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    overrides = [f"recipes={recipe}", f"model.path={tmp_path}", "rollout=vllm"]
    config = compose_config(overrides, Library.find(None), Machine(1, None))
    models = models_of(config, from_config=True)
    assert models is not None
    target = target_of(config, ON_CARD[recipe], 1)
    plan = memory_plan(config, models, target)
    # Leave 5 % of the memory for gaps between tensors.
    assert plan.peak.total < 0.95 * ON_CARD[recipe], {phase.name: phase.total / 2**30 for phase in plan.phases}
    config.model.lora.enabled = False
    assert not memory_plan(config, models, target).fits


def test_policy_and_reference_share_one_base(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    overrides = ["recipes=gsm8k_qwen_7b_lora", f"model.path={tmp_path}", "rollout=vllm"]
    config = compose_config(overrides, Library.find(None), Machine(1, None))
    models = models_of(config, from_config=True)
    assert models is not None
    plan = memory_plan(config, models, target_of(config, ON_CARD["gsm8k_qwen_7b_lora"], 1))
    trained = adapted(models.policy, config.model.lora, config.backend).count
    update = next(phase for phase in plan.phases if phase.name == "actor update").items
    assert "reference weights" not in update
    assert update["actor weights"] == 2 * models.policy.count + 4 * trained
    assert update["actor gradients"] == 4 * trained
    assert update["actor optimizer"] == 8 * trained
    assert plan.checkpoint.by_part == {"actor/model": 4 * trained, "actor/optimizer": 8 * trained}
