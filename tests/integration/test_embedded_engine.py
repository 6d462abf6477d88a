"""The embedded engine against transformers' own forward and generate, over the variants of attention."""

import dataclasses
import itertools
import random
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    LogitsProcessorList,
    MambaConfig,
    MinPLogitsWarper,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
)

from rlhf import events
from rlhf.config.schema.rollout import RolloutConfig
from rlhf.errors import UserError
from rlhf.rollout import Request, Sample, SamplingParams, decoding
from rlhf.rollout.embedded import EmbeddedEngine, build_embedded_engine, check_lengths
from rlhf.rollout.kv_cache import RowCache
from rlhf.rollout.weight_digest import WeightsMismatch
from tests.support.in_float64 import TOLERANCE, in_float64
from tests.support.rounding import FLOAT32
from tests.support.sampled import asking, sampled

EOS = 1
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "bos_token_id": 0,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}
FAMILIES = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES),
    "mistral_window_5": MistralConfig(**SIZES, sliding_window=5),
    "gemma2_window_5": Gemma2Config(**SIZES, sliding_window=5),
    "gemma3_window_5": Gemma3TextConfig(
        **SIZES, sliding_window=5, layer_types=["sliding_attention", "full_attention"] * 2
    ),
    "gpt2": GPT2Config(
        vocab_size=64,
        n_embd=32,
        n_layer=3,
        n_head=4,
        n_positions=512,
        initializer_range=0.25,
        bos_token_id=0,
        eos_token_id=EOS,
    ),
    "bloom_alibi": BloomConfig(
        vocab_size=64, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.25, eos_token_id=EOS
    ),
}


def make_model(config: Any, attention: str = "sdpa", seed: int = 0) -> Any:
    torch.manual_seed(seed)
    if config.model_type in ("gemma2", "bloom"):
        attention = "eager"
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def assert_log_probs(sample: Sample, expected: torch.Tensor) -> None:
    """Check the log-probs of a sample, which are float32, against those of a model in float64."""
    assert expected.dtype == torch.float64
    torch.testing.assert_close(torch.tensor(sample.log_probs).double(), expected, rtol=FLOAT32, atol=TOLERANCE)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """64 tokens: two specials, lower-case letters, pairs of letters (so that texts have several spellings), digits."""
    letters = [chr(ord("a") + i) for i in range(26)]
    words = ["<bos>", "<eos>", *letters, *(a + b for a, b in itertools.pairwise(letters)), *"0123456789?"]
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", bos_token="<bos>")


def prompts(count: int, longest: int = 12, seed: int = 0) -> list[Request]:
    rng = random.Random(seed)
    return [Request(1000 + i, [rng.randrange(2, 64) for _ in range(rng.randint(1, longest))]) for i in range(count)]


def reference_log_probs(model: Any, request: Request, sample: Sample, temperature: float = 1.0) -> torch.Tensor:
    """Return the log-probs of a response from one full forward pass without cache or padding."""
    ids = torch.tensor([request.token_ids + sample.token_ids.tolist()])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(request.token_ids) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(sample.token_ids.tolist())[:, None])[:, 0]


def assert_same(left: list[Sample], right: list[Sample]) -> None:
    """Check that samples are equal. Log-probs may differ by the float64 rounding of other batch shapes."""
    for a, b in zip(left, right, strict=True):
        assert dataclasses.replace(a, log_probs=b.log_probs) == b
        assert_log_probs(a, torch.tensor(b.log_probs).double())


@pytest.mark.parametrize("family", FAMILIES)
@in_float64()
def test_greedy_equals_transformers_generate(family: str, tokenizer: PreTrainedTokenizerFast) -> None:
    model = make_model(FAMILIES[family])
    requests = prompts(7)
    samples = sampled(
        EmbeddedEngine(model, tokenizer, 3), requests, SamplingParams(temperature=0, max_tokens=20), seed=0, step=0
    )
    for request, sample in zip(requests, samples, strict=True):
        ids = torch.tensor([request.token_ids])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20, pad_token_id=0
        )[0, ids.shape[1] :].tolist()
        assert sample.token_ids.tolist() == expected
        assert sample.finish_reason == ("stop" if expected[-1] == EOS else "length")
        reference = reference_log_probs(model, request, sample)
        assert_log_probs(sample, reference)


def test_sampling_masks_need_memory_for_their_tokens_only(tokenizer: PreTrainedTokenizerFast) -> None:
    """With a place for each token that top_k and max_tokens allow, this call would need 26 MB."""
    engine, requests = EmbeddedEngine(make_model(FAMILIES["llama"]), tokenizer, 32), prompts(200)
    params = SamplingParams(temperature=3.0, max_tokens=500, top_k=64, top_p=0.5, sampling_mask=True)
    tracemalloc.start()
    try:
        samples = sampled(engine, requests, params, seed=0, step=0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    widths = {count for s in samples if s.sampling_mask is not None for count in s.sampling_mask.counts.tolist()}
    assert min(widths) > 0
    assert len(widths) > 1
    assert peak < 13e6


def penalised_log_probs(model: Any, request: Request, sample: Sample, params: SamplingParams) -> torch.Tensor:
    """Return the log-probs of a response: for each token, by a forward pass and transformers' processors."""
    warpers = [RepetitionPenaltyLogitsProcessor(params.repetition_penalty)]
    if params.temperature:
        warpers += [TemperatureLogitsWarper(params.temperature), MinPLogitsWarper(params.min_p)]
    found = []
    for position, token in enumerate(sample.token_ids.tolist()):
        ids = torch.tensor([request.token_ids + sample.token_ids.tolist()[:position]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[:, -1]
        found.append(LogitsProcessorList(warpers)(ids, logits).log_softmax(-1)[0, token].item())
    return torch.tensor(found)


@in_float64()
def test_a_repetition_penalty_is_that_of_transformers_generate(tokenizer: PreTrainedTokenizerFast) -> None:
    model, requests = make_model(FAMILIES["llama"]), prompts(7)
    # The engine has three rows for seven requests, so rows move, and later requests reuse rows.
    engine = EmbeddedEngine(model, tokenizer, 3)
    params = SamplingParams(temperature=0, max_tokens=20, repetition_penalty=1.5)
    greedy = sampled(engine, requests, params, seed=0, step=0)
    for request, sample in zip(requests, greedy, strict=True):
        ids = torch.tensor([request.token_ids])
        expected = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=20,
            pad_token_id=0,
            repetition_penalty=1.5,
        )
        assert sample.token_ids.tolist() == expected[0, ids.shape[1] :].tolist()
        assert_log_probs(sample, penalised_log_probs(model, request, sample, params))
    plain = sampled(engine, requests, dataclasses.replace(params, repetition_penalty=1.0), seed=0, step=0)
    assert [s.token_ids.tolist() for s in plain] != [s.token_ids.tolist() for s in greedy]


@in_float64()
def test_a_penalty_follows_its_sample_whatever_the_batch(tokenizer: PreTrainedTokenizerFast) -> None:
    model, requests = make_model(FAMILIES["llama"]), prompts(5, longest=20)
    params = SamplingParams(max_tokens=40, temperature=1.3, min_p=0.05, repetition_penalty=1.3)
    whole = sampled(EmbeddedEngine(model, tokenizer, 256), requests, params, 3, seed=1, step=2)
    assert {s.finish_reason for s in whole} == {"stop", "length"}
    for width in (1, 4):
        assert_same(whole, sampled(EmbeddedEngine(model, tokenizer, width), requests, params, 3, seed=1, step=2))
    for i, sample in enumerate(whole[:6]):
        assert_log_probs(sample, penalised_log_probs(model, requests[i // 3], sample, params))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
@in_float64()
def test_log_probs_equal_a_full_forward_pass(family: str, attention: str, tokenizer: PreTrainedTokenizerFast) -> None:
    model = make_model(FAMILIES[family], attention)
    requests = prompts(5)
    params = SamplingParams(temperature=1.5, max_tokens=24)
    samples = sampled(EmbeddedEngine(model, tokenizer, 6), requests, params, 3, seed=3, step=4)
    assert [(s.uid, s.sample) for s in samples] == [(r.uid, i) for r in requests for i in range(3)]
    for i, sample in enumerate(samples):
        reference = reference_log_probs(model, requests[i // 3], sample, 1.5)
        assert_log_probs(sample, reference)


def test_requests_with_other_sampling_parameters_are_batched_separately(tokenizer: PreTrainedTokenizerFast) -> None:
    engine, drawn, greedy = (
        EmbeddedEngine(make_model(FAMILIES["llama"]), tokenizer, 6),
        SamplingParams(max_tokens=12),
        SamplingParams(temperature=0, max_tokens=9, ignore_eos=True),
    )
    mixed = [one for prompt in prompts(4) for one in asking([prompt], drawn, 3) + asking([prompt], greedy)]
    answers = engine.generate(mixed, seed=3, step=4)
    # The bits are equal, because the mixed call and the call with one kind of request use the same batches.
    for params in (drawn, greedy):
        alike = [place for place, request in enumerate(mixed) if request.params == params]
        assert [answers[i] for i in alike] == engine.generate([mixed[i] for i in alike], seed=3, step=4)
    assert [sample.sample for sample in answers] == [0, 1, 2, 0] * 4


def test_finished_samples_are_counted(tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[tuple[str, int, int]] = []
    monkeypatch.setattr(events, "_followers", [lambda *report: reports.append(report)])
    engine = EmbeddedEngine(make_model(FAMILIES["llama"]), tokenizer, 6)
    samples = sampled(engine, prompts(4), SamplingParams(max_tokens=12), 3, seed=3, step=4)
    assert reports[-1] == (events.GENERATING, 12, 12)
    assert len(reports) <= len({len(sample) for sample in samples}) * 2, "reports must count samples, not tokens"
    assert [done for _, done, _ in reports] == sorted({done for _, done, _ in reports})


@pytest.mark.parametrize(("family", "max_tokens"), [("llama", 100), ("gemma3_window_5", 30)])
@in_float64()
def test_samples_do_not_depend_on_batch_order_or_width(
    family: str, max_tokens: int, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(FAMILIES[family])
    requests = prompts(4, longest=20)
    params = SamplingParams(max_tokens=max_tokens)
    whole = sampled(EmbeddedEngine(model, tokenizer, 256), requests, params, 4, seed=1, step=2)
    assert {s.finish_reason for s in whole} == {"stop", "length"}
    for width in (1, 5):
        assert_same(whole, sampled(EmbeddedEngine(model, tokenizer, width), requests, params, 4, seed=1, step=2))
    engine = EmbeddedEngine(model, tokenizer, 8)
    split = [s for r in requests for s in sampled(engine, [r], params, 4, seed=1, step=2)]
    assert_same(whole, split)
    backwards = sampled(engine, requests[::-1], params, 4, seed=1, step=2)
    assert_same(whole, sorted(backwards, key=lambda s: (s.uid, s.sample)))
    monkeypatch.setattr(decoding, "PREFILL_TOKENS", 50)
    assert_same(whole, sampled(EmbeddedEngine(model, tokenizer, 256), requests, params, 4, seed=1, step=2))


def test_each_prompt_is_prefilled_once_and_finished_samples_leave(tokenizer: PreTrainedTokenizerFast) -> None:
    model = make_model(FAMILIES["llama"])
    shapes: list[tuple[int, int]] = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    requests = [Request(i, [2 + i] * 7) for i in range(6)]
    samples = sampled(EmbeddedEngine(model, tokenizer, 8), requests, SamplingParams(max_tokens=60), 4, seed=0, step=0)
    assert sum(rows for rows, length in shapes if length > 1) == len(requests)
    decoded = sum(rows for rows, length in shapes if length == 1)
    # The token drawn from the prefill needs no decoding, and no finished sample is fed through the model again.
    assert decoded == sum(len(s) - 1 for s in samples)


def test_the_same_call_is_bit_identical_and_other_coordinates_differ(tokenizer: PreTrainedTokenizerFast) -> None:
    engine = EmbeddedEngine(make_model(FAMILIES["qwen3"]), tokenizer, 10)
    requests, params = prompts(6), SamplingParams(max_tokens=16)
    first = sampled(engine, requests, params, 4, seed=1, step=1)
    assert sampled(engine, requests, params, 4, seed=1, step=1) == first
    assert sampled(engine, requests, params, 4, seed=2, step=1) != first
    assert sampled(engine, requests, params, 4, seed=1, step=2) != first
    assert len({tuple(s.token_ids.tolist()) for s in first[:4]}) > 1


def test_nan_in_a_cache_slot_does_not_reach_the_next_sample() -> None:
    """A masked NaN in the cache would still reach the attention's output, because 0 times NaN is NaN."""

    def prefilled(length: int, value: float) -> RowCache:
        cache = RowCache(FAMILIES["llama"])
        for layer in range(4):
            cache.update(torch.full((1, 2, length, 8), value), torch.full((1, 2, length, 8), value), layer)
        return cache

    cache, first = RowCache(FAMILIES["llama"]), torch.zeros(1, dtype=torch.int64)
    cache.reserve(prefilled(9, torch.nan), rows=1, columns=20, end=9)
    cache.append(prefilled(9, torch.nan), first, width=9)
    cache.move(first[:0], first[:0], rows=0)
    cache.append(prefilled(2, 1.0), first, width=2)
    for layer in cache.attention:
        for states in (layer.keys, layer.values):
            assert states[0, 0, :9, 0].tolist() == [0.0] * 7 + [1.0] * 2


def test_top_k_1_is_greedy(tokenizer: PreTrainedTokenizerFast) -> None:
    engine = EmbeddedEngine(make_model(FAMILIES["qwen2"]), tokenizer, 4)
    greedy = sampled(engine, prompts(4), SamplingParams(temperature=0, max_tokens=9), seed=0, step=0)
    top_1 = sampled(engine, prompts(4), SamplingParams(top_k=1, max_tokens=9), seed=0, step=0)
    assert [s.token_ids.tolist() for s in top_1] == [s.token_ids.tolist() for s in greedy]
    assert all(lp == 0 for s in top_1 for lp in s.log_probs.tolist())


def test_empty_and_minimal_calls(tokenizer: PreTrainedTokenizerFast) -> None:
    engine = EmbeddedEngine(make_model(FAMILIES["gpt2"]), tokenizer, 4)
    assert sampled(engine, [], SamplingParams(), seed=0, step=0) == []
    [sample] = sampled(engine, [Request(5, [3])], SamplingParams(max_tokens=1), seed=0, step=0)
    assert (sample.uid, sample.sample, len(sample), len(sample.log_probs)) == (5, 0, 1, 1)
    with pytest.raises(ValueError, match="no tokens"):
        sampled(engine, [Request(5, [])], SamplingParams(), seed=0, step=0)


def test_eos_comes_from_model_and_tokenizer_and_can_be_ignored(tokenizer: PreTrainedTokenizerFast) -> None:
    model = make_model(FAMILIES["llama"])
    model.generation_config.eos_token_id = [5, 9]
    engine = EmbeddedEngine(model, tokenizer, 64)
    params = SamplingParams(temperature=5.0, max_tokens=60)
    samples = sampled(engine, prompts(3), params, 20, seed=0, step=0)
    stopped = [s for s in samples if s.finish_reason == "stop"]
    assert {s.token_ids.tolist()[-1] for s in stopped} == {EOS, 5, 9}
    assert all(not {EOS, 5, 9} & set(s.token_ids.tolist()[:-1]) for s in samples)
    ignoring = sampled(engine, prompts(3), dataclasses.replace(params, ignore_eos=True), 20, seed=0, step=0)
    assert all(len(s) == 60 and s.finish_reason == "length" for s in ignoring)
    assert all(
        long.token_ids.tolist()[: len(s)] == s.token_ids.tolist() for s, long in zip(samples, ignoring, strict=True)
    )


def test_stop_strings_over_several_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    engine = EmbeddedEngine(make_model(FAMILIES["llama"]), tokenizer, 16)
    params = SamplingParams(temperature=3.0, max_tokens=40, ignore_eos=True)
    free = sampled(engine, prompts(4), params, 16, seed=0, step=0)
    text = tokenizer.decode(free[0].token_ids.tolist())
    stop = (text[5:9], text[30:33])
    samples = sampled(engine, prompts(4), dataclasses.replace(params, stop=stop), 16, seed=0, step=0)
    stopped = 0
    for unstopped, sample in zip(free, samples, strict=True):
        ends = [
            i + 1 for i in range(40) if any(s in tokenizer.decode(unstopped.token_ids.tolist()[: i + 1]) for s in stop)
        ]
        assert sample.token_ids.tolist() == unstopped.token_ids.tolist()[: ends[0] if ends else 40]
        assert sample.finish_reason == ("stop" if ends else "length")
        stopped += bool(ends)
    assert 0 < stopped < len(samples)


def test_update_weights(tokenizer: PreTrainedTokenizerFast) -> None:
    policy, other = make_model(FAMILIES["qwen2"]), make_model(FAMILIES["qwen2"], seed=1)
    engine = build_embedded_engine(policy, tokenizer, RolloutConfig(max_num_seqs=8))
    requests, params = prompts(4), SamplingParams(max_tokens=10)
    before = sampled(engine, requests, params, 2, seed=0, step=0)
    assert before == sampled(EmbeddedEngine(policy, tokenizer, 8), requests, params, 2, seed=0, step=0)
    engine.update_weights(other.named_parameters, 3)
    after = sampled(engine, requests, params, 2, seed=0, step=0)
    assert after != before
    expected = sampled(EmbeddedEngine(other, tokenizer, 8), requests, params, 2, seed=0, step=0)
    assert after == [replace(sample, versions=((3, len(sample)),)) for sample in expected]

    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        engine.update_weights(lambda: ((n, p) for n, p in other.named_parameters() if n != "model.norm.weight"), 4)
    with pytest.raises(ValueError, match="nonsense"):
        engine.update_weights(lambda: [("nonsense", torch.zeros(1))], 4)
    with pytest.raises(ValueError, match="shape"):
        engine.update_weights(lambda: [("model.norm.weight", torch.zeros(1))], 4)
    assert engine.version == 3


def test_weights_that_the_engine_does_not_hold_after_a_hand_over_are_named(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, other = make_model(FAMILIES["qwen2"]), make_model(FAMILIES["qwen2"], seed=1)
    engine = build_embedded_engine(policy, tokenizer, RolloutConfig(dtype="bfloat16"))
    engine.update_weights(policy.named_parameters, 1)
    targets, norm = engine.model.state_dict(keep_vars=True), engine.model.model.norm.weight

    def mismatch(replaced: dict[str, torch.Tensor], damaged: int = 0) -> str:
        """Return the error if some weights go to the copies in `replaced`, or if the bits `damaged` flip in a norm."""

        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            yield from other.named_parameters()
            norm.view(torch.int16)[0] ^= damaged

        with monkeypatch.context() as patched:
            patched.setattr(engine.model, "state_dict", lambda keep_vars: targets | replaced)
            with pytest.raises(WeightsMismatch) as error:
                engine.update_weights(weights, 2)
        return str(error.value)

    copies = {id(tensor): tensor.clone() for tensor in targets.values()}
    moved = [name for name, weight in policy.named_parameters() if not torch.equal(weight, other.get_parameter(name))]
    everything = mismatch({name: copies[id(tensor)] for name, tensor in targets.items()})
    assert f"Changed in training, but the engine still has the old values: {len(moved)} ({moved[0]}, " in everything
    assert "Neither" not in everything
    name = "model.layers.0.mlp.down_proj.weight"
    assert mismatch({name: copies[id(targets[name])]}).endswith(f"the engine still has the old values: 1 ({name}).")
    assert mismatch({}, 1).endswith("Neither the old values nor the values sent: 1 (model.norm.weight).")
    assert engine.version == 1
    engine.update_weights(other.named_parameters, 2)
    assert engine.version == 2


def test_the_engine_has_a_copy_of_the_policy_in_its_dtype(tokenizer: PreTrainedTokenizerFast) -> None:
    policy = make_model(FAMILIES["qwen2"])
    engine = build_embedded_engine(policy, tokenizer, RolloutConfig(dtype="bfloat16"))
    assert {p.dtype for p in engine.model.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    assert engine.model.lm_head.weight is engine.model.model.embed_tokens.weight
    assert engine.model.model.rotary_emb.inv_freq.dtype == torch.float32
    samples = sampled(engine, prompts(3), SamplingParams(max_tokens=8), 2, seed=0, step=0)
    assert len(samples) == 6


def test_lengths_beyond_the_models_positions_are_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    config = FAMILIES["gpt2"]
    check_lengths(config, 256, 256)
    with pytest.raises(UserError, match=r"data\.max_prompt_length=300 and data\.max_response_length=213"):
        check_lengths(config, 300, 213)
    with pytest.raises(UserError, match="max_response_length"):
        sampled(
            EmbeddedEngine(make_model(config), tokenizer, 1),
            [Request(0, [2] * 500)],
            SamplingParams(max_tokens=13),
            seed=0,
            step=0,
        )


def test_architectures_without_a_kv_cache_are_rejected(tokenizer: PreTrainedTokenizerFast) -> None:
    model = AutoModelForCausalLM.from_config(
        MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2, state_size=4)
    )
    with pytest.raises(UserError, match=r"model\.path.*mamba"):
        EmbeddedEngine(model, tokenizer, 1)
