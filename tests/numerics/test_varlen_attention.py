"""Tests attention by one kernel over a packed row. A function with the same arguments replaces the kernel of GPUs."""

import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf.models import varlen_attention
from rlhf.models.packing import pack
from tests.support.packed_passes import ARCHITECTURES, WINDOW, loss_and_gradients, skewed_batch, tiny_lm

LAYERS = 2


def by_definition(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, key_starts: Tensor, longest: int, _: int, **options: Any
) -> Tensor:
    """Compute what torch documents for `varlen_attn`, head by head. Tensors are [T, heads, dimension]."""
    assert torch.equal(starts, key_starts)
    assert starts.dtype == torch.int32
    bounds, (left, right) = starts.tolist(), options["window_size"]
    assert right == 0
    assert options["enable_gqa"] == (query.shape[1] != key.shape[1])
    repeats, scale = query.shape[1] // key.shape[1], options["scale"] or query.shape[-1] ** -0.5
    outputs = []
    for first, end in itertools.pairwise(bounds):
        assert end - first <= longest
        q, k, v = (part[first:end].transpose(0, 1) for part in (query, key, value))
        scores = q @ k.repeat_interleave(repeats, 0).transpose(1, 2) * scale
        places = torch.arange(end - first)
        distance = places[:, None] - places
        hidden = (distance < 0) | ((distance > left) if left >= 0 else torch.zeros_like(distance, dtype=torch.bool))
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        outputs.append((weights @ v.repeat_interleave(repeats, 0)).transpose(0, 1))
    return torch.cat(outputs)


def mixes_sequences(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, _: Tensor, *rest: Any, **options: Any):
    whole = torch.tensor([0, len(query)], dtype=torch.int32)
    return by_definition(query, key, value, whole, whole, len(query), len(query), **options)


def ignores_windows(*arguments: Any, **options: Any) -> Tensor:
    return by_definition(*arguments, **options | {"window_size": (-1, 0)})


def fails(*_: Any, **__: Any) -> Tensor:
    raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")


def loses_a_gradient(query: Tensor, key: Tensor, *rest: Any, **options: Any) -> Tensor:
    return by_definition(query, key.detach() + 0.0 * key, *rest, **options)


@pytest.fixture
def installed(monkeypatch):
    """Return a function that installs a kernel for CPUs, and returns the list of its calls' windows."""

    def install(kernel: Callable[..., Tensor]) -> list[tuple[int, int]]:
        windows: list[tuple[int, int]] = []

        def counted(*arguments: Any, **options: Any) -> Tensor:
            windows.append(options["window_size"])
            return kernel(*arguments, **options)

        monkeypatch.setattr(varlen_attention, "DEVICES", ("cpu",))
        monkeypatch.setattr(varlen_attention, "DTYPES", (torch.float64,))
        monkeypatch.setattr(varlen_attention, "varlen_attn", counted)
        varlen_attention._works.cache_clear()
        return windows

    yield install
    varlen_attention._works.cache_clear()


def packed(architecture: str, attention: str = "sdpa") -> dict[str, Tensor]:
    model = tiny_lm(architecture, attention=attention)
    pack(model)
    return loss_and_gradients(model, [skewed_batch()])


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    norm = torch.stack([value.norm() for value in expected.values()]).norm()
    for name, value in expected.items():
        assert float((found[name] - value).abs().max() / norm) <= 1e-12, name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_one_call_per_layer_equals_a_call_per_length(installed, architecture, caplog):
    caplog.set_level(logging.INFO)
    expected = packed(architecture)
    windows = installed(by_definition)
    assert_equal(packed(architecture), expected)
    assert "attention of packed sequences: torch's varlen_attn" in caplog.text
    of_check = len(varlen_attention.WINDOWS)
    assert len(windows) == of_check + LAYERS
    limited = {"gemma3_text": [(WINDOW - 1, 0), (-1, 0)], "mistral": [(WINDOW - 1, 0)] * LAYERS}
    assert windows[of_check:] == limited.get(architecture, [(-1, 0)] * LAYERS)


@pytest.mark.parametrize("kernel", [mixes_sequences, ignores_windows, fails, loses_a_gradient])
def test_a_kernel_that_fails_or_differs_is_not_used(installed, kernel, caplog):
    expected = packed("mistral")
    calls = installed(kernel)
    assert_equal(packed("mistral"), expected)
    assert len(calls) <= len(varlen_attention.WINDOWS)
    assert "one call per length, since varlen_attn" in caplog.text
    assert ("fails (FlashAttention only supports" in caplog.text) == (kernel is fails)


def test_eager_attention_does_not_use_the_kernel(installed):
    calls = installed(by_definition)
    packed("qwen2", "eager")
    assert calls == []


@pytest.mark.parametrize(
    ("limit", "options", "used"),
    [
        (None, {}, True),
        (3, {"sliding_window": 3}, True),
        (3, {}, False),  # chunks shorter than a sequence
        (8, {}, True),  # chunks at least as long as every sequence
        (None, {"softcap": 30.0}, False),
        (None, {"s_aux": torch.ones(2)}, False),
        (None, {"dropout": 0.1}, False),
        (None, {"is_causal": False}, False),
        (None, {"is_causal": None}, True),
    ],
)
def test_masks_and_options_that_the_kernel_cannot_express(installed, limit, options, used):
    installed(by_definition)
    rows = [torch.randn(1, 2, 8, 4, dtype=torch.float64) for _ in range(3)]
    row = {"cu_seq_lens_q": torch.tensor([0, 8], dtype=torch.int32), "max_length_q": 8}
    found = varlen_attention.varlen_attention(torch.nn.Identity(), *rows, limit, row | options)
    assert (found is not None) == used


def test_a_value_of_another_size_or_a_layer_that_is_not_causal(installed):
    installed(by_definition)
    rows = [torch.randn(1, 2, 8, size, dtype=torch.float64) for size in (4, 4, 3)]
    row = {"cu_seq_lens_q": torch.tensor([0, 8], dtype=torch.int32), "max_length_q": 8}
    assert varlen_attention.varlen_attention(torch.nn.Identity(), *rows, None, row) is None
    layer = torch.nn.Identity()
    layer.is_causal = False
    assert varlen_attention.varlen_attention(layer, rows[0], rows[0], rows[0], None, row) is None
