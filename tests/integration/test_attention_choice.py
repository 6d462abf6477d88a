"""The attention that suits a model and a machine: eager for Gemma 2, and flash-attention only where it can run."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, Gemma2Config

from rlhf.compose import compose_config
from rlhf.config.library import Library
from rlhf.errors import EXIT_DONE, EXIT_USER_ERROR
from rlhf.models.config_check import check_flash_attention, default_attention
from rlhf.models.loading import ModelSource, ModelStart, load_model, load_model_config
from rlhf.planning.memory_plan import Models, Target, memory_plan
from rlhf.planning.model_shapes import shapes_from_files
from tests.support.forked_start import train_forked
from tests.support.launching import small, write_sums
from tests.support.refusals import says, user_error
from tests.support.tiny_models import TINY_POLICY, save, tiny_config


def tiny_gemma2(folder: Path) -> Path:
    """A Gemma 2 whose soft-capping changes the attention."""
    with safe_open(TINY_POLICY / "model.safetensors", "pt") as file:
        vocabulary = file.get_tensor("model.embed_tokens.weight").shape[0]
    config = Gemma2Config(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        attn_logit_softcapping=0.5,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    save(AutoModelForCausalLM.from_config(config), folder)
    return folder


def test_gemma_2_trains_with_eager_attention_by_default(tmp_path):
    folder, sums = tiny_gemma2(tmp_path / "gemma2"), write_sums(tmp_path / "sums.jsonl")
    settings = [f"model.path={folder}", "trainer.total_training_steps=2", "trainer.save_freq=0"]
    end = train_forked(small(tmp_path, "x", sums, *settings))
    assert end.code == EXIT_DONE, end.output
    says(end.output, f"model.path={folder}", "gemma2", "sdpa", "model.attn_implementation=eager")


def test_the_attention_of_a_loaded_model(tmp_path):
    source = ModelSource("model.path", str(tiny_gemma2(tmp_path / "gemma2")))
    model = load_model(ModelStart(source, Path(source.path), load_model_config(source, Path(source.path))))
    assert model.config._attn_implementation == "eager" == default_attention("gemma2")
    save(AutoModelForCausalLM.from_config(tiny_config("qwen2")), tmp_path / "qwen2")
    source = ModelSource("model.path", str(tmp_path / "qwen2"))
    model = load_model(ModelStart(source, Path(source.path), load_model_config(source, Path(source.path))))
    assert model.config._attn_implementation == "sdpa" == default_attention("qwen2")
    assert default_attention("no_such_type") == "sdpa"


def test_the_memory_plan_counts_the_attention_that_is_used(tmp_path):
    path = str(tiny_gemma2(tmp_path / "gemma2"))
    models = Models(shapes_from_files(path))

    def peaks(attention: str) -> list[int]:
        overrides = ["recipes=minimal", f"model.path={path}", "data=reasoning_gym"]
        config = compose_config([*overrides, f"model.attn_implementation={attention}"], Library.find(None))
        return [phase.total for phase in memory_plan(config, models, Target(True, 1)).phases]

    assert peaks("sdpa") == peaks("eager") != peaks("flash_attention_2")


def test_flash_attention_without_a_gpu_ends_before_the_ranks_start(tmp_path):
    sums = write_sums(tmp_path / "sums.jsonl")
    end = train_forked(small(tmp_path, "x", sums, "model.attn_implementation=flash_attention_2", "trainer.device=cpu"))
    assert end.code == EXIT_USER_ERROR
    says(end.output, "model.attn_implementation=flash_attention_2", "GPU", "model.attn_implementation=sdpa")
    assert "Traceback" not in end.output
    assert "attempt" not in end.output


def test_what_flash_attention_needs():
    name = "flash_attention_2"
    says(user_error(check_flash_attention, name, True, "none"), name, "backend.autocast=bfloat16", "none")
    if not any(map(find_spec, ("flash_attn", "kernels"))):
        says(user_error(check_flash_attention, name, True, "bfloat16"), name, "pip install flash-attn", "sdpa")


@pytest.mark.skipif(find_spec("flash_attn") is not None, reason="needs a machine without flash-attn")
def test_an_architecture_without_flash_attention(tmp_path):
    save(AutoModelForCausalLM.from_config(tiny_config("bloom")), tmp_path)
    source = ModelSource("model.path", str(tmp_path), attn_implementation="flash_attention_2")
    message = user_error(load_model, ModelStart(source, tmp_path, load_model_config(source, tmp_path)))
    says(message, "model.attn_implementation=flash_attention_2", str(tmp_path), "bloom", "attn_implementation=sdpa")
