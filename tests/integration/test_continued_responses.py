"""A response that is interrupted and continued equals an uninterrupted one, wherever the cut is."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

from rlhf.rollout import Request, Sample, SamplingParams
from rlhf.rollout.embedded import EmbeddedEngine
from rlhf.rollout.engine import Quota, siblings
from rlhf.rollout.stop_strings import cut_at_seam
from tests.support.in_float64 import TOLERANCE, in_float64
from tests.support.rounding import FLOAT32
from tests.support.sampled import asking

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
FAMILIES = {
    "llama": LlamaConfig(**SIZES),
    "gemma3_window_5": Gemma3TextConfig(**SIZES, sliding_window=5, layer_types=["sliding_attention", "full_attention"]),
    "gpt2": GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=512, initializer_range=0.25, eos_token_id=1
    ),
}
PARAMS = SamplingParams(max_tokens=24, temperature=1.4, repetition_penalty=1.2, top_p=0.95)
PROMPTS = [Request(7, [5, 6, 7]), Request(8, [9] * 11), Request(9, [30, 31])]


def tokenizer() -> PreTrainedTokenizerFast:
    """64 tokens: two specials, letters, and pairs of letters."""
    letters = [chr(ord("a") + i) for i in range(26)]
    words = ["<bos>", "<eos>", *letters, *(a + b for a, b in itertools.pairwise(letters)), *"0123456789?"]
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", bos_token="<bos>")


def engine_of(family: str = "llama", width: int = 4) -> EmbeddedEngine:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family], attn_implementation="sdpa").eval()
    return EmbeddedEngine(model, tokenizer(), width)


def head(sample: Sample, tokens: int, version: int = 0) -> Sample:
    """Return the first tokens of a sample, as an engine that was interrupted returns them."""
    ids, log_probs = sample.token_ids[:tokens], sample.log_probs[:tokens]
    return Sample.of(sample.uid, sample.sample, ids, log_probs, "partial", version)


def assert_same(found: Sample, whole: Sample) -> None:
    assert replace(found, log_probs=whole.log_probs, versions=whole.versions) == whole
    np.testing.assert_allclose(found.log_probs, whole.log_probs, rtol=FLOAT32, atol=TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
@in_float64()
def test_a_continued_response_equals_an_uninterrupted_one(family: str) -> None:
    engine = engine_of(family)
    requests = asking(PROMPTS, PARAMS, 3)
    whole = engine.generate(requests, seed=1, step=2)
    assert {sample.finish_reason for sample in whole} == {"stop", "length"}
    for cut in (1, 2, 5, 6, 11, max(map(len, whole)) - 1):
        # Some rows continue, others begin in the same call.
        cuts = [cut if len(sample) > cut else 0 for sample in whole]
        begun = [
            replace(request, response=head(sample, tokens)) if tokens else request
            for request, sample, tokens in zip(requests, whole, cuts, strict=True)
        ]
        for found, expected in zip(engine.generate(begun, seed=1, step=2), whole, strict=True):
            assert_same(found, expected)


@in_float64()
def test_a_continued_response_keeps_versions_and_observations() -> None:
    engine = engine_of()
    [whole] = engine.generate([replace(PROMPTS[0], params=PARAMS)], seed=1, step=2)
    so_far = replace(head(whole, 6, version=3), observations=((4, 6),))
    for version, runs in ((3, ((3, len(whole)),)), (5, ((3, 6), (5, len(whole))))):
        engine.version = version
        request = replace(PROMPTS[0], params=PARAMS, response=so_far)
        [sample] = engine.generate([request], seed=1, step=2)
        assert_same(replace(sample, observations=()), whole)
        assert (sample.versions, sample.observations) == (runs, ((4, 6),))


def test_the_whole_response_counts_for_max_tokens() -> None:
    engine = engine_of()
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    request = replace(PROMPTS[0], params=params)
    [whole] = engine.generate([request], seed=0, step=0)
    [sample] = engine.generate([replace(request, response=head(whole, 7))], seed=0, step=0)
    assert (len(sample), sample.finish_reason) == (8, "length")
    with pytest.raises(ValueError, match="8 tokens already; max_tokens is 8"):
        engine.generate([replace(request, response=head(whole, 8))], seed=0, step=0)


def test_a_stop_string_may_span_the_continuation_but_not_an_observation() -> None:
    engine = engine_of()
    free = SamplingParams(temperature=3.0, max_tokens=40, ignore_eos=True)
    [unstopped] = engine.generate([replace(PROMPTS[0], params=free)], seed=0, step=0)
    text = tokenizer().decode(unstopped.token_ids[10:14].tolist())
    request = replace(PROMPTS[0], params=replace(free, stop=(text,)))
    [whole] = engine.generate([request], seed=0, step=0)
    assert (len(whole), whole.finish_reason) == (14, "stop")
    for cut in range(14):
        continued = replace(request, response=head(whole, cut))
        [sample] = engine.generate([continued], seed=0, step=0)
        assert (sample.token_ids.tolist(), sample.finish_reason) == (whole.token_ids.tolist(), "stop"), cut
        # vLLM looks for stop strings only in the new tokens. If one crosses the seam, `cut_at_seam` cuts the response.
        onwards = replace(unstopped, versions=((0, len(unstopped)),))
        found = cut_at_seam(onwards, continued, tokenizer())
        assert found.token_ids.tolist() == (whole if cut > 10 else onwards if not cut else found).token_ids.tolist()
    told = replace(head(whole, 13), observations=((12, 13),))
    [sample] = engine.generate([replace(request, response=told)], seed=0, step=0)
    assert len(sample) > 14, "a stop string must not match the text of an observation"


def test_siblings_with_responses_share_no_prefill() -> None:
    alike = [replace(PROMPTS[0], sample=number) for number in range(3)]
    assert siblings(alike) == [range(3)]
    begun = [replace(request, response=Sample.of(7, request.sample, [4], [-1.0], "partial")) for request in alike]
    assert siblings(begun) == [range(1), range(1, 2), range(2, 3)]


@in_float64()
def test_generation_stops_after_the_wanted_groups_and_continues_later() -> None:
    params = SamplingParams(max_tokens=60, temperature=3.0)
    requests = asking(PROMPTS, params, 2)
    requests += [replace(prompt, params=replace(params, temperature=0.0), sample=2) for prompt in PROMPTS]
    expected = {(s.uid, s.sample): s for s in engine_of().generate(requests, seed=1, step=2)}
    # Which group ends first depends on the processor.
    longest = {uid: max(len(expected[uid, sample]) for sample in range(2)) for uid in (7, 8, 9)}
    shortest = min(longest, key=lambda uid: longest[uid])
    assert longest[shortest] < params.max_tokens
    requests.sort(key=lambda request: request.uid != shortest)
    for width in (2, 12):
        engine, waiting, rounds, uids = engine_of(width=width), requests, 0, frozenset({shortest})
        while waiting:
            samples = engine.generate_until(waiting, [Quota(uids, 1)], seed=1, step=2)
            left = {sample.uid for sample in samples if sample.finish_reason == "partial"}
            assert len(left) < len({request.uid for request in waiting}), "no group is complete"
            for sample in samples:
                if sample.finish_reason != "partial":
                    assert_same(sample, expected[sample.uid, sample.sample])
            waiting = [
                replace(request, response=sample if len(sample) else None)
                for request, sample in zip(waiting, samples, strict=True)
                if sample.finish_reason == "partial"
            ]
            rounds += 1
            uids = frozenset(request.uid for request in waiting)
        assert rounds > 1
