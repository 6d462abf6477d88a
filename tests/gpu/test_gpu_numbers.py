"""Packing and the log-prob head on a device against plain results in float64 on the CPU."""

import logging
from dataclasses import fields
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlhf.algorithms.token_log_probs import token_log_probs
from rlhf.models import varlen_attention
from rlhf.models.packing import pack
from tests.support.gpus import DEVICES
from tests.support.packed_passes import ARCHITECTURES, loss_and_gradients, skewed_batch, tiny_lm
from tests.support.rounding import sum_bound
from tests.support.tiny_models import tiny_config
from tests.support.tiny_updates import EveryBatch

TOKENS, HIDDEN, VOCAB = 700, 64, 5000
TEMPERATURE = 0.7


def on_device(batch: EveryBatch, device: str) -> EveryBatch:
    values = {field.name: getattr(batch, field.name) for field in fields(EveryBatch)}
    return EveryBatch(
        **{name: value.to(device) if isinstance(value, Tensor) else value for name, value in values.items()}
    )


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Compare the loss relative to itself, and each gradient relative to the norm of all gradients."""
    assert found.keys() == expected.keys()
    loss, norm = expected[""], torch.stack([value.norm() for name, value in expected.items() if name]).norm()
    for name, value in expected.items():
        difference = (found[name].to(value) - value).abs().max()
        assert float(difference / (norm if name else loss.abs())) <= tolerance, name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("architecture", ["qwen2", "gemma3_text"])
def test_packed_by_sdpa_equals_padded_on_the_cpu(device, architecture):
    assert architecture in ARCHITECTURES
    expected = loss_and_gradients(tiny_lm(architecture), [skewed_batch()])
    model = tiny_lm(architecture, torch.float32).to(device)
    pack(model)
    # The loss sums over its tokens, and each log-prob needs at most 300 additions.
    bound = sum_bound(int(skewed_batch().response_mask.sum()) + 300)
    assert_near(loss_and_gradients(model, [on_device(skewed_batch(), device)]), expected, bound)


def on_gpu(*, packed: bool, attention: str, dtype: torch.dtype, window: int | None = None) -> dict[str, Tensor]:
    torch.manual_seed(1)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    limit = {} if window is None else {"sliding_window": window}
    config = tiny_config("qwen2" if window is None else "mistral", **sizes, **limit)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).to("cuda", dtype).train()
    if packed:
        pack(model)
    return loss_and_gradients(model, [on_device(skewed_batch(), "cuda")])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.skipif(find_spec("flash_attn") is None, reason="needs flash-attn")
def test_packed_by_flash_attention_equals_padded():
    exact = on_gpu(packed=False, attention="sdpa", dtype=torch.float32)
    for packed in (True, False):
        assert_near(on_gpu(packed=packed, attention="flash_attention_2", dtype=torch.bfloat16), exact, 5e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [None, 5])
def test_packed_by_one_kernel_equals_padded(window, caplog):
    caplog.set_level(logging.INFO)
    exact = on_gpu(packed=False, attention="sdpa", dtype=torch.float32, window=window)
    varlen_attention._works.cache_clear()
    assert_near(on_gpu(packed=True, attention="sdpa", dtype=torch.bfloat16, window=window), exact, 5e-2)
    assert "attention of packed sequences: torch's varlen_attn" in caplog.text


@pytest.mark.parametrize("device", DEVICES)
def test_log_probs_from_hidden_states_equal_the_plain_formula(device):
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(n, HIDDEN, generator=generator) / 4 for n in (TOKENS, VOCAB))
    labels = torch.randint(VOCAB, (TOKENS,), generator=generator)
    weights = torch.linspace(-1, 2, TOKENS)
    exact = [tensor.double().requires_grad_() for tensor in (hidden, weight)]
    every = torch.log_softmax(exact[0] @ exact[1].T / TEMPERATURE, dim=-1)
    expected = every.gather(1, labels[:, None])[:, 0], -(every.exp() * every).sum(dim=-1)
    wanted = torch.autograd.grad((expected[0] * weights).sum(), exact)
    mine = [tensor.to(device).requires_grad_() for tensor in (hidden, weight)]
    found = token_log_probs(mine[0], labels.to(device), TEMPERATURE, weight=mine[1], with_entropy=True)
    gradients = torch.autograd.grad((found[0] * weights.to(device)).sum(), mine)
    for value, plain in zip((*found, *gradients), (*expected, *wanted), strict=True):
        assert value is not None
        assert value.device.type == device
        # Values sum over the vocabulary, logits over the hidden size. Errors are relative to the largest value.
        bound = sum_bound(VOCAB + HIDDEN) * plain.abs().max().item()
        torch.testing.assert_close(value.double().cpu(), plain, rtol=0, atol=bound)
