"""Compares log-probs and entropies of padded batches with one forward pass per unpadded sequence."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rlhf.algorithms import token_log_probs as log_probs_module
from rlhf.backends import fsdp2
from rlhf.backends.fsdp2 import Fsdp2Model
from rlhf.config import BackendConfig
from rlhf.learning.policy import Policy, response_log_probs
from rlhf.models.log_prob_head import with_log_probs
from rlhf.models.log_prob_probe import check_log_probs
from tests.support.engines import CPU, ENGINES
from tests.support.in_float64 import TOLERANCE, in_float64
from tests.support.numeric_ranks import single_rank
from tests.support.tiny_updates import VOCAB, EveryBatch, random_batch, tiny_gemma2, tiny_qwen2


class WithoutKnownHead(nn.Module):
    """A model whose output layer cannot be found, as in some custom model files on the Hub."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, use_cache: bool):
        return self.model(input_ids=input_ids, use_cache=use_cache)


def expected_of(model: nn.Module, batch: EveryBatch, temperature: float) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies, [N, R] each, from the float64 log-softmax of one unpadded sequence at a time."""
    shape = batch.rollout_log_probs.shape
    log_probs, entropies = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    for row in range(len(batch)):
        prompt, response = int(batch.prompt_lengths[row]), int(batch.response_lengths[row])
        ids = batch.input_ids[row, : prompt + response]
        logits = model(input_ids=ids[None], use_cache=False).logits[0].double()
        every = torch.log_softmax(logits / temperature, dim=-1)
        for token in range(response):
            of_token = every[prompt - 1 + token]
            log_probs[row, token] = of_token[ids[prompt + token]]
            entropies[row, token] = -(of_token.exp() * of_token).sum()
    return log_probs, entropies


def gradients_of(model: nn.Module, log_probs: Tensor, entropies: Tensor | None) -> dict[str, Tensor]:
    """Return the model's gradients of a loss that weights every token differently."""
    model.zero_grad()
    weights = torch.linspace(-1, 2, log_probs.numel(), dtype=log_probs.dtype).view_as(log_probs)
    loss = (log_probs * weights).sum()
    if entropies is not None:
        loss = loss + 0.3 * (entropies * weights.flip(0)).sum()
    (loss / 10).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("wrap", [lambda model: model, WithoutKnownHead], ids=["chunks", "whole_logits"])
@in_float64()
def test_equals_a_full_forward_pass_of_each_sequence(temperature, wrap):
    model, batch = tiny_qwen2(), random_batch(seed=3, samples=9)
    expected = expected_of(model, batch, temperature)
    for with_entropy in (True, False):
        ours, entropy = response_log_probs(with_log_probs(wrap(model)), batch, temperature, with_entropy=with_entropy)
        torch.testing.assert_close(ours, expected[0], rtol=TOLERANCE, atol=TOLERANCE)
        assert (entropy is not None) == with_entropy
    _, entropy = response_log_probs(with_log_probs(wrap(model)), batch, temperature, with_entropy=True)
    torch.testing.assert_close(entropy, expected[1], rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("entropy_in_loss", [True, False])
@pytest.mark.parametrize("chunk_elements", [1 << 26, 2000, 130, 1])
@in_float64()
def test_gradients(chunk_elements, entropy_in_loss, monkeypatch):
    monkeypatch.setitem(log_probs_module.CHUNK_ELEMENTS, "cpu", chunk_elements)
    model, batch = tiny_qwen2(), random_batch(seed=4, samples=7)
    log_probs, entropies = expected_of(model, batch, 0.8)
    expected = gradients_of(model, log_probs, entropies if entropy_in_loss else None)
    log_probs, entropies = response_log_probs(with_log_probs(model), batch, 0.8, with_entropy=True)
    ours = gradients_of(model, log_probs, entropies if entropy_in_loss else None)
    assert any(g.abs().max() > 0.1 for g in expected.values())
    torch.testing.assert_close(ours, expected, rtol=TOLERANCE, atol=TOLERANCE)


@in_float64()
def test_chunk_size_does_not_change_results(monkeypatch):
    model, batch = tiny_qwen2(), random_batch(seed=5, samples=7)
    whole = response_log_probs(with_log_probs(model), batch, 1.0, with_entropy=True)
    gradients = gradients_of(model, *whole)
    for elements in (2000, 130, 1):  # several rows, part of a row, one token
        monkeypatch.setitem(log_probs_module.CHUNK_ELEMENTS, "cpu", elements)
        parts = response_log_probs(with_log_probs(model), batch, 1.0, with_entropy=True)
        torch.testing.assert_close(parts, whole, rtol=TOLERANCE, atol=TOLERANCE)
        torch.testing.assert_close(gradients_of(model, *parts), gradients, rtol=TOLERANCE, atol=TOLERANCE)


def test_padding_tokens_do_not_change_results():
    model, batch = tiny_qwen2(), random_batch(seed=6, samples=5)
    other = copy.deepcopy(batch)
    columns = torch.arange(batch.input_ids.shape[1])
    other.input_ids[columns >= (batch.prompt_lengths + batch.response_lengths)[:, None]] = 17
    for one, two in zip(
        response_log_probs(with_log_probs(model), batch, 1.0, with_entropy=True),
        response_log_probs(with_log_probs(model), other, 1.0, with_entropy=True),
        strict=True,
    ):
        assert one.dtype == torch.float32
        assert torch.equal(one, two)
        assert not one[~batch.response_mask].any()


@pytest.mark.parametrize("samples", [1, 4])
@in_float64()
def test_sequences_of_equal_length(samples):
    model, batch = tiny_qwen2(), random_batch(seed=7, samples=samples, prompt=(3, 3), response=(1, 1))
    ours, _ = response_log_probs(with_log_probs(model), batch, 1.0, with_entropy=False)
    torch.testing.assert_close(ours, expected_of(model, batch, 1.0)[0], rtol=TOLERANCE, atol=TOLERANCE)


def test_bfloat16_autocast_is_close_and_returns_float32_log_probs_and_gradients():
    batch = random_batch(seed=9, samples=6)
    whole = tiny_qwen2()
    expected = expected_of(whole, batch, 1.0)
    expected_gradients = gradients_of(whole, *expected)
    with single_rank():
        half = Fsdp2Model(tiny_qwen2(), BackendConfig(autocast="bfloat16"), CPU)
        ours = Policy(half, 1.0, 64).log_probs(batch, with_entropy=True)
        gradients = gradients_of(half.module, *ours)
    for value, reference in zip(ours, expected, strict=True):
        assert value.dtype == torch.float32
        assert 1e-4 < (value.double() - reference).abs().max() < 0.1
    for name, gradient in gradients.items():
        assert gradient.dtype == torch.float32
        assert torch.cosine_similarity(gradient.to_local().flatten(), expected_gradients[name].flatten(), 0) > 0.99, (
            name
        )


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("gpt2", {}),
        ("phi", {}),  # its head has a bias
        ("gemma2", {"final_logit_softcapping": 2.0}),
        ("gemma3_text", {"final_logit_softcapping": 2.0, "tie_word_embeddings": False}),
        ("granite", {"logits_scaling": 3.0}),
        ("cohere", {"logit_scale": 0.25}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@in_float64()
def test_other_architectures(family, settings):
    model, batch = tiny(family, **settings), random_batch(seed=10, samples=4)
    expected = expected_of(model, batch, 0.7)
    expected_gradients = gradients_of(model, *expected)
    ours = response_log_probs(with_log_probs(model), batch, 0.7, with_entropy=True)
    assert model.whole_logits is None
    options = {"rtol": TOLERANCE, "atol": TOLERANCE}
    torch.testing.assert_close(ours, expected, **options)
    torch.testing.assert_close(gradients_of(model, *ours), expected_gradients, **options)
    again = response_log_probs(copy.deepcopy(model), batch, 0.7, with_entropy=True)
    assert all(torch.equal(one, two) for one, two in zip(ours, again, strict=True))


def tiny(family: str, **settings: object) -> PreTrainedModel:
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8}
    config = AutoConfig.for_model(
        family, **sizes, num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3, **settings
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


@in_float64()
def test_a_model_that_changes_hidden_states_before_its_head_computes_all_logits_at_once(caplog):
    """MiniCPM3 divides the hidden states; only a comparison with its own logits detects the division."""
    low = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    model, batch = tiny("minicpm3", **low, intermediate_size=24, dim_model_base=4), random_batch(seed=10, samples=4)
    expected = expected_of(model, batch, 0.7)
    with single_rank():
        module = Fsdp2Model(model, BackendConfig(), CPU).module
        assert module.whole_logits is None
        check_log_probs(module, CPU)
        ours = response_log_probs(module, batch, 0.7, with_entropy=True)
    assert "not computed in chunks, because log-probs of minicpm3 in chunks are off by " in caplog.text
    torch.testing.assert_close(ours, expected, rtol=TOLERANCE, atol=TOLERANCE)


@in_float64()
def test_the_comparison_at_the_start_has_the_precision_of_float64():
    """The head is off by 1e-6, which is within the tolerance of a half-precision type."""
    with single_rank():
        module = Fsdp2Model(tiny_qwen2(), BackendConfig(), CPU).module
        module._parts = replace(module._parts, finish=lambda logits: logits * (1 + 1e-6))
        check_log_probs(module, CPU)
    assert module.whole_logits is not None


@in_float64()
def test_the_comparison_at_the_start_accepts_correct_models_in_float64(caplog):
    with single_rank():
        for model in (tiny_qwen2(), tiny_gemma2()):
            check_log_probs(Fsdp2Model(model, BackendConfig(), CPU).module, CPU)
    assert caplog.text == ""


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp2-bfloat16"])
def test_the_comparison_at_the_start_accepts_correct_models(kind, caplog):
    with single_rank():
        for model in (tiny_qwen2(), tiny_gemma2()):
            check_log_probs(Fsdp2Model(model, ENGINES[kind], CPU).module, CPU)
    assert caplog.text == ""


def test_an_untied_head_is_an_fsdp_unit_of_its_own(monkeypatch):
    monkeypatch.setattr(fsdp2, "stays_plain", lambda *_: False)
    with single_rank():
        heads = [Fsdp2Model(model, BackendConfig(), CPU).module.lm_head for model in (tiny_qwen2(), tiny_gemma2())]
    assert [isinstance(head, FSDPModule) for head in heads] == [False, True]


@pytest.mark.parametrize("make", [tiny_qwen2, tiny_gemma2])
def test_weights_that_stay_gathered_and_recomputed_layers_give_equal_gradients(make, monkeypatch):
    monkeypatch.setattr(fsdp2, "stays_plain", lambda *_: False)
    model, batch = make().train(), random_batch(seed=8, samples=5)
    plain = gradients_of(model, *response_log_probs(with_log_probs(model), batch, 1.0, with_entropy=True))
    other = make().train()
    other.gradient_checkpointing_enable({"use_reentrant": False})
    with single_rank():
        module = Fsdp2Model(other, BackendConfig(reshard_after_forward=False), CPU).module
        again = gradients_of(module, *response_log_probs(module, batch, 1.0, with_entropy=True))
        assert all(torch.equal(plain[name], g.to_local()) for name, g in again.items())
