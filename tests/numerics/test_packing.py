"""Tests that sequences packed into one row give the same results as the same sequences in padded rows."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlhf.learning.critic import response_values
from rlhf.learning.policy import response_log_probs
from rlhf.models.log_prob_head import with_log_probs
from rlhf.models.packing import lay_out, pack, unpack
from tests.support.in_float64 import TOLERANCE, in_float64
from tests.support.numeric_ranks import run_ranks, single_rank
from tests.support.packed_passes import (
    ARCHITECTURES,
    LIMIT,
    WINDOW,
    loss_and_gradients,
    packed_on_ranks,
    shares,
    skewed_batch,
    tiny_lm,
)
from tests.support.rounding import sum_bound
from tests.support.tiny_updates import tiny_value_model

TOKENS = 500
"""Largest number of tokens of the batch, and so of terms in the sum of a weight's gradient."""
TOLERANCES = {torch.float64: 1e-12, torch.float32: sum_bound(TOKENS)}


@pytest.fixture(scope="module")
def padded() -> dict[str, dict[str, Tensor]]:
    """Return loss and gradients of every architecture in float64, from one batch of padded rows."""
    return {name: loss_and_gradients(tiny_lm(name), [skewed_batch()]) for name in ARCHITECTURES}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Compare losses relative to the expected loss, and gradients relative to the norm of all gradients."""
    loss = expected[""]
    assert abs(found[""] - loss) <= tolerance * abs(loss)
    gradients = {name: value for name, value in expected.items() if name}
    norm = torch.stack([value.norm() for value in gradients.values()]).norm()
    assert found.keys() == expected.keys()
    for name, value in gradients.items():
        assert float((found[name] - value).abs().max() / norm) <= tolerance, name


def test_the_batch_covers_short_long_and_equal_lengths():
    batch = skewed_batch()
    lengths = (batch.prompt_lengths + batch.response_lengths).tolist()
    assert min(lengths) == 1
    assert sum(lengths) <= TOKENS
    assert max(lengths) == LIMIT
    assert len(set(lengths)) < len(lengths) - 5
    assert sum(length > WINDOW for length in lengths) > 10
    tokens = [sum(lengths[row] for rows in micro_batches for row in rows) for micro_batches in shares(4)]
    assert tokens[1] > 50 * tokens[0]
    assert tokens[2:] == [0, 0]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_packed_equals_padded_on_any_number_of_ranks(padded, world_size, request):
    architectures = tuple(ARCHITECTURES)
    if world_size > 1 and not request.config.getoption("full_product"):
        architectures = architectures[::2] if world_size == 2 else architectures[1::2]
    work = partial(packed_on_ranks, architectures)
    if world_size == 1:
        with single_rank():
            every = [work()]
    else:
        every = run_ranks(world_size, work)
    for results in every:
        assert len(results) == len(architectures) * len(TOLERANCES)
        for architecture in architectures:
            for dtype, tolerance in TOLERANCES.items():
                assert_same(results[f"{architecture}/{dtype}"], padded[architecture], tolerance)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_equals_padded_with_eager_attention(padded, architecture):
    model = tiny_lm(architecture, attention="eager")
    pack(model)
    assert_same(loss_and_gradients(model, [skewed_batch()]), padded[architecture], 1e-12)


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_packed_equals_padded_with_gradient_checkpointing(padded, architecture):
    model = tiny_lm(architecture, torch.float32)
    model.activation_checkpointing_enable({"use_reentrant": False})
    pack(model)
    assert_same(loss_and_gradients(model, [skewed_batch()]), padded[architecture], TOLERANCES[torch.float32])


@in_float64()
def test_log_probs_entropies_and_values_equal_those_of_padded_rows():
    batch, critic = skewed_batch(), tiny_value_model()
    policy = with_log_probs(tiny_lm("qwen2", torch.float32))

    def results() -> list[Tensor]:
        log_probs, entropy = response_log_probs(policy, batch, 0.7, with_entropy=True)
        assert entropy is not None
        return [log_probs, entropy, response_values(critic, batch)]

    expected = results()
    for model in (policy, critic):
        pack(model)
    for found, value in zip(results(), expected, strict=True):
        torch.testing.assert_close(found, value, rtol=TOLERANCE, atol=TOLERANCE)
        assert not found[~batch.response_mask].any()


@pytest.mark.parametrize("packed", [True, False])
def test_no_pass_uses_a_kv_cache(packed):
    batch = skewed_batch()
    for model, run in (
        (
            with_log_probs(tiny_lm("llama", torch.float32)),
            lambda m: response_log_probs(m, batch, 1.0, with_entropy=False),
        ),
        (tiny_value_model(), lambda m: response_values(m, batch)),
    ):
        given: list[tuple[Any, dict[str, Any]]] = []
        model.register_forward_pre_hook(
            lambda _, args, kwargs, given=given: given.append((args, kwargs)), with_kwargs=True
        )
        if packed:
            pack(model)
        run(model)
        ((args, kwargs),) = given
        assert args == ()
        assert kwargs["use_cache"] is False
        assert not {"cache", "past_key_values"} & kwargs.keys()
        assert kwargs.get("attention_mask") is None
        lengths = sorted((batch.prompt_lengths + batch.response_lengths).tolist())
        if packed:
            assert kwargs["input_ids"].shape == (1, sum(lengths))
            assert kwargs["position_ids"].tolist() == [[i for length in lengths for i in range(length)]]


def test_a_cache_would_mix_sequences():
    """This is why no pass may use a KV cache. If this test fails one day, a cache would only cost memory."""
    batch, model = skewed_batch(), tiny_lm("llama")
    pack(model)
    inputs = lay_out(model, batch.input_ids, batch.prompt_lengths + batch.response_lengths).inputs
    unpack(model)
    inputs = {name: inputs[name] for name in ("input_ids", "position_ids")}
    with torch.no_grad():
        apart, mixed = (model(**inputs, use_cache=cache).logits for cache in (False, True))
    assert float((mixed - apart).abs().max()) > 0.1


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        made = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.elements = max([self.elements, *made])
        return result


@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_packed_passes_build_no_mask_of_the_whole_row(architecture):
    batch, model = skewed_batch(), tiny_lm(architecture)
    pack(model)
    rows = lay_out(model, batch.input_ids, batch.prompt_lengths + batch.response_lengths)
    tokens = rows.inputs["input_ids"].shape[1]
    with Largest() as largest:
        model.base_model(**rows.inputs)[0].sum().backward()
    assert largest.elements < tokens**2 / 2
    unpack(model)
    inputs = {name: rows.inputs[name] for name in ("input_ids", "position_ids", "use_cache")}
    with Largest() as largest:
        model.base_model(**inputs)
    assert largest.elements >= tokens**2


@pytest.mark.parametrize("packed", [True, False])
def test_a_rank_without_samples_computes_one_token_with_zero_gradients(packed):
    batch, model = skewed_batch().micro_batch([]), tiny_lm("llama")
    if packed:
        pack(model)
    found = loss_and_gradients(model, [batch])
    assert len(found) == len(list(model.parameters())) + 1
    assert not any(value.any() for value in found.values())
    assert lay_out(model, batch.input_ids, batch.prompt_lengths).inputs["input_ids"].shape == (1, 1)
