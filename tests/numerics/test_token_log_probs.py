"""Compares log-probs in chunks with the plain formula, values and gradients, and tests their peak memory."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import Qwen2ForCausalLM

from rlhf.algorithms import token_log_probs as module
from rlhf.algorithms.liger_log_probs import liger_log_probs
from rlhf.algorithms.token_log_probs import Finish, token_log_probs
from rlhf.config import ActorConfig, BackendConfig, GuardsConfig, RolloutCorrectionConfig
from rlhf.learning.actor import Actor
from rlhf.learning.guards import Guards
from tests.support.numeric_ranks import single_rank
from tests.support.rounding import sum_bound
from tests.support.tiny_updates import balance_in_order, random_batch, tiny_qwen2
from tests.support.update_cases import OPTIM, engine

TOKENS, HIDDEN, VOCAB = 50, 7, 31
TEMPERATURE = 0.7
TERMS = TOKENS + HIDDEN + VOCAB
"""Terms of the sums in a gradient: over tokens, in the product and in the softmax."""


def soft_capped(product: Tensor) -> Tensor:
    return torch.tanh(product * 3 / 2) * 2


def drawn(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return random hidden states, weight and bias with gradients, and labels. One vocabulary entry is padding."""
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(n, HIDDEN, generator=generator).to(dtype) for n in (TOKENS, VOCAB))
    bias = torch.randn(VOCAB, generator=generator).to(dtype)
    bias[3] = -torch.inf
    labels = torch.randint(4, VOCAB, (TOKENS,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), labels


def plain(hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, finish: Finish | None) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies from all logits at once. With soft-capping the padding entry has a probability."""
    logits = linear(hidden, weight, bias)
    every = torch.log_softmax((logits if finish is None else finish(logits)) / TEMPERATURE, dim=-1)
    return every.gather(1, labels[:, None])[:, 0], -(every.exp() * every.nan_to_num(neginf=0.0)).sum(dim=-1)


def gradients(inputs: Sequence[Tensor], log_probs: Tensor, entropy: Tensor | None) -> tuple[Tensor, ...]:
    weights = torch.linspace(-1, 2, TOKENS, dtype=log_probs.dtype, device=log_probs.device)
    loss = (log_probs * weights).sum()
    if entropy is not None:
        loss = loss + (entropy * weights.flip(0)).sum()
    return torch.autograd.grad(loss, inputs)


@pytest.mark.parametrize("chunk", [1 << 24, 7 * VOCAB, 1])
@pytest.mark.parametrize("finish", [None, soft_capped])
@pytest.mark.parametrize("entropy_in_loss", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, sum_bound(TERMS))])
def test_values_and_gradients(chunk, finish, entropy_in_loss, dtype, tolerance, monkeypatch):
    """Compares with float64. A gradient's error is relative to the largest element of its tensor."""
    monkeypatch.setitem(module.CHUNK_ELEMENTS, "cpu", chunk)
    *inputs, labels = drawn(dtype)
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = plain(*exact, labels, finish)
    hidden, weight, bias = inputs
    options: dict[str, Any] = {"weight": weight, "bias": bias, "finish": finish, "with_entropy": True}
    found = token_log_probs(hidden, labels, TEMPERATURE, **options)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, check_dtype=False)
    for gradient, true in zip(
        gradients(inputs, found[0], found[1] if entropy_in_loss else None),
        gradients(exact, expected[0], expected[1] if entropy_in_loss else None),
        strict=True,
    ):
        largest = true.abs().max().item()
        torch.testing.assert_close(gradient, true, rtol=0, atol=tolerance * largest, check_dtype=False)
    assert token_log_probs(hidden, labels, TEMPERATURE, **options | {"with_entropy": False})[1] is None


@pytest.mark.parametrize("chunks", [0, 1, 2, 3, 100])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_heads_gradient_may_wait_for_several_chunks(chunks, dtype, monkeypatch):
    """GPUs add several chunks to the head's gradient at once: an addition costs more than a chunk's product."""
    monkeypatch.setitem(module.CHUNK_ELEMENTS, "cpu", 7 * VOCAB)
    added: list[int] = []
    add = module._Sum._add

    def counted(total: Any, left: Tensor, right: Tensor) -> None:
        added.append(len(left))
        add(total, left, right)

    monkeypatch.setattr(module._Sum, "_add", counted)
    *inputs, labels = drawn(dtype)
    found = []
    for size in (0, chunks * 7 * VOCAB * dtype.itemsize):
        added.clear()
        monkeypatch.setitem(module.HEAD_GRADIENT_BYTES, "cpu", size)
        hidden, weight, bias = inputs
        of = token_log_probs(hidden, labels, TEMPERATURE, weight=weight, bias=bias, with_entropy=True)
        found.append(gradients(inputs, *of))
    together = chunks if chunks > 1 else 1
    assert added == [min(7 * together, TOKENS - first) for first in range(0, TOKENS, 7 * together)]
    tolerance = 1e-12 if dtype == torch.float64 else sum_bound(TERMS, torch.bfloat16)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance * other.abs().max().item())


@pytest.mark.gpu
@pytest.mark.skipif(not (torch.cuda.is_available() or "TRITON_INTERPRET" in os.environ), reason="needs a CUDA device")
@pytest.mark.parametrize("with_bias", [True, False])
def test_liger_kernel_gives_the_same_log_probs_and_gradients(with_bias):
    """Runs on a GPU, or with `TRITON_INTERPRET=1` on a CPU."""
    pytest.importorskip("liger_kernel")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    hidden, weight, _, labels = (tensor.detach().to(device) for tensor in drawn(torch.float32))
    bias = torch.linspace(-1, 1, VOCAB, device=device) if with_bias else None
    inputs = [tensor.requires_grad_() for tensor in (hidden, weight, bias) if tensor is not None]
    expected, _ = token_log_probs(hidden, labels, TEMPERATURE, weight=weight, bias=bias, with_entropy=False)
    found = liger_log_probs(hidden, labels, TEMPERATURE, weight, bias)
    error = sum_bound(TERMS)
    torch.testing.assert_close(found, expected, rtol=error, atol=error)
    for one, other in zip(gradients(inputs, found, None), gradients(inputs, expected, None), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=error * other.abs().max().item())


def test_logits_instead_of_hidden_states():
    hidden, weight, bias, labels = drawn(torch.float64)
    logits = linear(hidden, weight, bias).detach().requires_grad_()
    before = logits.detach().clone()
    found = token_log_probs(logits, labels, TEMPERATURE, with_entropy=True)
    every = torch.log_softmax(logits / TEMPERATURE, dim=-1)
    expected = every.gather(1, labels[:, None])[:, 0], -(every.exp() * every.nan_to_num(neginf=0.0)).sum(dim=-1)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients((logits,), *found), gradients((logits,), *expected), rtol=1e-12, atol=1e-12)
    assert torch.equal(logits, before)


def test_bfloat16_product_with_float32_softmax():
    hidden, weight, bias, labels = drawn(torch.bfloat16)
    found, _ = token_log_probs(hidden, labels, TEMPERATURE, weight=weight, bias=bias, with_entropy=False)
    expected = torch.log_softmax(linear(hidden, weight, bias).float() / TEMPERATURE, dim=-1)
    assert found.dtype == torch.float32
    largest = expected[expected.isfinite()].abs().max().item()
    torch.testing.assert_close(
        found, expected.gather(1, labels[:, None])[:, 0], rtol=0, atol=largest * sum_bound(VOCAB)
    )
    assert [g.dtype for g in gradients((hidden, weight, bias), found, None)] == [torch.bfloat16] * 3


def test_gradients_without_tokens_are_zero():
    hidden, weight, bias, labels = drawn(torch.float32)
    found = token_log_probs(hidden[:0], labels[:0], TEMPERATURE, weight=weight, bias=bias, with_entropy=True)
    for gradient in torch.autograd.grad(sum(value.sum() for value in found), (hidden, weight, bias)):
        assert not gradient.any()


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returned."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **kwargs or {})
        sizes = [value.numel() for value in tree_iter(result) if isinstance(value, Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


@contextmanager
def actor(vocabulary: int, **others: Any) -> Iterator[Actor]:
    """Yield an actor with this process as the only rank."""
    torch.manual_seed(0)
    config = tiny_qwen2().config
    config.vocab_size = vocabulary
    settings = ActorConfig(optim=OPTIM, **others)
    with single_rank():
        backend = engine(Qwen2ForCausalLM(config), settings, BackendConfig())
        yield Actor(
            backend,
            settings,
            RolloutCorrectionConfig(),
            temperature=1.0,
            scale=30,
            log_prob_budget=4096,
        )


def test_no_tensor_of_an_update_contains_all_logits(monkeypatch):
    monkeypatch.setitem(module.CHUNK_ELEMENTS, "cpu", 100 * 3000)
    batch = random_batch(seed=1, samples=40, response=(10, 30))
    tokens = int(batch.response_mask.sum())
    spread = balance_in_order(batch)
    guards = Guards(GuardsConfig())
    with actor(vocabulary=3000, entropy_coeff=0.1) as policy:
        guards.begin(1, 0.0)
        with Largest() as chunked:
            policy.all_log_probs(batch, spread)
            policy.update(batch, spread, guards)
        policy.backend.module.whole_logits = "a control"
        with Largest() as control:
            policy.update(batch, spread, guards)
    assert tokens > 600
    assert chunked.elements == 100 * 3000
    assert control.elements >= tokens * 3000


def test_calculate_entropy_false_changes_no_weight():
    batch, guards = random_batch(seed=1, samples=8), Guards(GuardsConfig())
    spread = balance_in_order(batch)
    figures, weights = [], []
    for others in ({}, {"calculate_entropy": False}):
        with actor(vocabulary=40, **others) as policy:
            guards.begin(1, 0.0)
            figures.append(policy.update(batch, spread, guards))
            weights.append({name: tensor.clone() for name, tensor in policy.backend.full_tensors()})
    assert figures[0].pop("actor/entropy") > 0
    assert figures[0] == figures[1]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    assert ActorConfig(calculate_entropy=False, entropy_coeff=0.1).needs_entropy


def peak_bytes(vocabulary: int) -> int:
    """Return the peak bytes that a forward and backward pass allocates."""
    weight = torch.randn(vocabulary, 4, requires_grad=True)
    hidden, labels = torch.randn(600, 4, requires_grad=True), torch.arange(600)
    with profile(profile_memory=True) as record:
        log_probs, entropy = token_log_probs(hidden, labels, TEMPERATURE, weight=weight, with_entropy=True)
        (log_probs.sum() + entropy.sum()).backward()
    held = peak = 0
    for event in record.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def test_the_memory_of_a_pass_does_not_grow_with_the_vocabulary(monkeypatch):
    monkeypatch.setitem(module.CHUNK_ELEMENTS, "cpu", 1 << 21)
    small, large = peak_bytes(8_000), peak_bytes(152_000)
    assert small > 4 * module.CHUNK_ELEMENTS["cpu"]
    assert large == pytest.approx(small, rel=0.1)
