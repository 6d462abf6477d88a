"""Tests the probe that detects models in which packed sequences would mix, and leaves those models unchanged."""

import logging

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2LMHeadModel, GPT2Model, PreTrainedModel

from rlhf.backends import fsdp2
from rlhf.backends.fsdp2 import shard
from rlhf.config import BackendConfig
from rlhf.errors import UserError
from rlhf.models.loading import without_dropout
from rlhf.models.packing import is_packed, pack
from rlhf.models.packing_probe import choose_packing, log_choice, packing_problem
from tests.support.numeric_ranks import single_rank
from tests.support.packed_passes import ARCHITECTURES, tiny_lm
from tests.support.tiny_models import tiny_config
from tests.support.tiny_updates import tiny_value_model

SETTING = "actor.use_remove_padding"


class IgnoresPositions(GPT2Model):
    """A trunk that ignores `position_ids` and counts from the beginning of the row."""

    def forward(self, *args, position_ids=None, **kwargs):
        return super().forward(*args, **kwargs)


def counting_from_zero() -> PreTrainedModel:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(without_dropout(tiny_config("gpt2")))
    model.transformer.__class__ = IgnoresPositions
    return model


def tiny(architecture: str, attention: str = "eager") -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny_config(architecture), attn_implementation=attention)


@pytest.fixture(autouse=True)
def rank():
    with single_rank():
        yield


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_models_that_keep_sequences_apart_are_packed(architecture, attention, caplog):
    caplog.set_level(logging.INFO)
    model = shard(tiny_lm(architecture, torch.float32, attention), BackendConfig(), torch.device("cpu"))
    state = torch.get_rng_state()
    choose_packing(model, None, SETTING)
    assert torch.equal(torch.get_rng_state(), state)
    assert is_packed(model)
    assert "actor: sequences packed without padding" in caplog.text
    implementation = model.config._attn_implementation
    pack(model)  # a second call changes nothing
    assert model.config._attn_implementation == implementation


def test_a_bfloat16_model_passes():
    model = tiny_lm("llama", torch.float32)
    assert packing_problem(shard(model, BackendConfig(autocast="bfloat16"), torch.device("cpu"))) is None


def test_a_head_of_zeros_does_not_hide_mixing():
    model = tiny_value_model()
    torch.nn.init.zeros_(model.score.weight)
    assert packing_problem(model) is None
    blind = counting_from_zero()
    torch.nn.init.zeros_(blind.lm_head.weight)
    assert "different results" in str(packing_problem(blind))


@pytest.mark.parametrize("model", ["linear attention", "blind to positions", "its own masks"])
def test_models_that_mix_sequences_stay_padded(model, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    made, reason = {
        "linear attention": (lambda: tiny("qwen3_5_text"), "it fails on a packed row (ValueError: "),
        "blind to positions": (counting_from_zero, "packed and separate sequences give different results"),
        "its own masks": (lambda: tiny("bloom"), "it fails on a packed row (TypeError"),
    }[model]
    monkeypatch.setattr(fsdp2, "stays_plain", lambda *_: False)
    module = shard(made(), BackendConfig(), torch.device("cpu"))
    given = module.config._attn_implementation
    choose_packing(module, None, SETTING)
    assert not is_packed(module)
    assert module.config._attn_implementation == given
    assert f"actor: sequences padded, since {reason}" in caplog.text
    assert model != "linear attention" or "Install `flash-linear-attention`" in caplog.text
    with pytest.raises(UserError, match=f"{SETTING}=true: sequences can't be packed .*{module.config.model_type}"):
        choose_packing(module, True, SETTING)
    # The error in the middle of the probe's pass must leave the engine usable.
    ids, plain = torch.arange(12).view(2, 6), made()
    for each in (module, plain):
        each(input_ids=ids, use_cache=False).logits.square().sum().backward()
    for (name, parameter), other in zip(module.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), other.grad, msg=name)


def test_false_skips_packing_and_the_probe(caplog):
    caplog.set_level(logging.INFO)
    model, calls = tiny_lm("llama"), []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    choose_packing(model, False, "critic.use_remove_padding")
    assert not is_packed(model)
    assert not calls
    assert "critic: sequences padded, since critic.use_remove_padding=false" in caplog.text


@pytest.mark.parametrize("make", [tiny_value_model, counting_from_zero])
def test_the_probe_multiplies_in_full_float32(make):
    model = make()
    seen = set()
    model.register_forward_pre_hook(lambda *_: seen.add(torch.get_float32_matmul_precision()))
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        packing_problem(model)
        assert seen == {"highest"}
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


def test_padding_on_a_gpu_that_nobody_asked_for_is_a_warning(caplog):
    caplog.set_level(logging.INFO)
    cases = [("cuda", None, "it fails"), ("cuda", None, None), ("cuda", False, "it fails"), ("cpu", None, "it fails")]
    for device, wanted, reason in cases:
        log_choice(SETTING, wanted, reason, torch.device(device))
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "INFO", "INFO"]
    assert "actor: sequences padded, since it fails" in caplog.messages[0]
