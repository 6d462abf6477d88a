"""The memory that the head of a recipe names is what the plan computes for its model and its GPUs."""

import json
import re
from pathlib import Path

import pytest

import rlhf
from rlhf.compose import compose_config
from rlhf.config.library import Library
from rlhf.planning.check import models_of, target_of
from rlhf.planning.device_defaults import Machine
from rlhf.planning.memory_plan import memory_plan

RECIPES = Path(rlhf.__file__).parents[1] / "recipes"
HEAD = re.compile(r"(\d+) GiB of each (\d+) GB GPU, (\d+) GiB of host memory")


def shape(model_type: str, hidden: int, inner: int, layers: int, heads: int, groups: int, vocabulary: int) -> dict:
    """Return what a plan reads of a model's config.json."""
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
    }


GEMMA3_1B = shape("gemma3_text", 1152, 6912, 26, 4, 1, 262144)
QWEN2_7B = shape("qwen2", 3584, 18944, 28, 28, 4, 152064)
LLAMA3_8B = shape("llama", 4096, 14336, 32, 32, 8, 128256)
MODELS = {
    "agent_gsm8k_qwen_3b": shape("qwen2", 2048, 11008, 36, 16, 2, 151936) | {"tie_word_embeddings": True},
    "gsm8k_gemma3_1b": GEMMA3_1B | {"head_dim": 256, "tie_word_embeddings": True, "sliding_window": 512},
    "math_qwen3_8b": shape("qwen3", 4096, 12288, 36, 32, 8, 151936) | {"head_dim": 128},
    "helpful_llama3_8b": LLAMA3_8B,
    "mbpp_qwen_7b": QWEN2_7B,
    "gsm8k_qwen_0.5b": shape("qwen2", 896, 4864, 24, 14, 2, 151936) | {"tie_word_embeddings": True},
    "gsm8k_qwen_7b_lora": QWEN2_7B,
    "gsm8k_qwen_7b_lora_24gb": QWEN2_7B,
    "dapo_math": QWEN2_7B,
    "dapo_math_32b": shape("qwen2", 5120, 27648, 64, 40, 8, 152064),
}
ON_ONE_GPU = (
    "agent_gsm8k_qwen_3b",
    "gsm8k_gemma3_1b",
    "gsm8k_qwen_0.5b",
    "gsm8k_qwen_7b_lora",
    "gsm8k_qwen_7b_lora_24gb",
)
CLASSIFIER = {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}


def test_each_recipe_for_gpus_names_its_planned_memory():
    small = {"offline", "minimal", "env_guess", "env_calculator", "agent_calculator"}
    assert {path.stem for path in RECIPES.glob("*.yaml")} - small == MODELS.keys()


@pytest.mark.parametrize("recipe", MODELS)
def test_the_head_names_the_planned_memory(recipe: str, tmp_path: Path):
    found = HEAD.search((RECIPES / f"{recipe}.yaml").read_text())
    assert found
    peak, card, host = map(int, found.groups())
    overrides = [f"recipes={recipe}", f"model.path={tmp_path / 'policy'}", "rollout=vllm"]
    paths = {"policy": MODELS[recipe]}
    if recipe == "helpful_llama3_8b":
        overrides.append(f"reward_model.path={tmp_path / 'judge'}")
        paths["judge"] = MODELS[recipe] | CLASSIFIER
    for name, config_json in paths.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config_json))
    ranks = 1 if recipe in ON_ONE_GPU else 8
    config = compose_config(overrides, Library.find(None), Machine(ranks, None))
    models = models_of(config, from_config=True)
    assert models is not None
    plan = memory_plan(config, models, target_of(config, card * 10**9, ranks * config.trainer.nnodes))
    assert plan.fits
    assert plan.peak.total / 2**30 == pytest.approx(peak, abs=1)
    assert sum(plan.host.values()) / 2**30 == pytest.approx(host, abs=1)
    # A part of the GPU stays free for gaps between tensors. Cards of 24 GB have 24 GiB, which is 7 % more.
    assert plan.peak.total < (0.95 if card == 24 else 0.9) * card * 10**9
