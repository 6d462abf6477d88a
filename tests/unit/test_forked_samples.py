"""Samples with forks: their rows, their form for users, and the noise of their rows."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoTokenizer

from rlhf.experience.episode import with_head
from rlhf.experience.shown_samples import _parts_of
from rlhf.models import tiny
from rlhf.rollout import Request, Sample, SamplingParams
from rlhf.rollout.sample import ROW
from rlhf.rollout.sample_codec import from_arrays, to_arrays
from rlhf.rollout.sampling import row_keys
from rlhf.rollout.vllm.requests import request_seed
from rlhf.tracking.sample_files import as_text
from tests.support.played import Sampler

LOG_PROBS = [-i / 8 for i in range(12)]
FORKED = replace(
    Sample.of(7, 2, range(12), LOG_PROBS, "stop", 0, [(2, 3), (4, 8), (9, 10)]),
    versions=((3, 2), (4, 9), (5, 12)),
    forks=((4, 3),),
)
"""Two turns; a history of four tokens, three of which are the prompt of the second row; two turns."""


def test_the_rows_of_a_forked_sample():
    first, second = FORKED.rows([50, 51])
    assert first.prompt_ids == [50, 51]
    assert first.response == replace(
        Sample.of(7, 2, range(4), LOG_PROBS[:4], "stop", 0, [(2, 3)]), versions=((3, 2), (4, 4))
    )
    assert second.prompt_ids == [4, 5, 6]
    assert second.response == replace(
        Sample.of(7, 2 + ROW, range(7, 12), LOG_PROBS[7:], "stop", 0, [(0, 1), (2, 3)]), versions=((4, 2), (5, 5))
    )


def test_a_sample_without_forks_is_its_row():
    plain = replace(FORKED, forks=())
    (row,) = plain.rows([50])
    assert row.response is plain


def test_an_empty_sample_is_a_row():
    failed = Sample.of(7, 2, [], [], "failed", 3)
    assert [row.response for row in failed.rows([50])] == [failed]


@pytest.mark.parametrize("forks", [((0, 1),), ((4, 0),), ((4, 8),), ((4, 4), (8, 1)), ((8, 1), (4, 1))])
def test_forks_that_are_no_rows_are_an_error(forks):
    with pytest.raises(ValueError, match="forks"):
        replace(FORKED, forks=forks)


def test_forks_survive_their_encoding():
    samples = [replace(FORKED, forks=()), FORKED, replace(FORKED, forks=((2, 1), (8, 2)))]
    assert from_arrays(to_arrays(samples)) == samples
    # Without forks, the form in files and on the wire is that of earlier releases.
    assert "forks" not in to_arrays(samples[:1])


def test_a_head_shifts_the_forks():
    first, second = with_head(FORKED, [60, 61]).rows([50])
    assert (first.prompt_ids, first.response.token_ids.tolist()) == ([50], [60, 61, 0, 1, 2, 3])
    assert second == FORKED.rows([])[1]


def test_rows_share_no_noise():
    """If a row had the noise of another, it would repeat this row's tokens after the same tokens."""
    engine = Sampler().engine
    prompt = AutoTokenizer.from_pretrained(tiny.FOLDER)(tiny.QUESTION.format(28, "+", 35))["input_ids"]
    params = SamplingParams(max_tokens=40, temperature=3.0, ignore_eos=True)
    requests = [Request(1, prompt, params, number + row * ROW) for number in range(4) for row in range(3)]
    texts = [tuple(sample.token_ids.tolist()) for sample in engine.generate(requests, seed=3, step=1)]
    assert len(set(texts)) == len(texts)
    numbers = torch.tensor([request.sample for request in requests])
    assert len(set(row_keys(3, 1, torch.ones_like(numbers), numbers).tolist())) == len(requests)
    seeds = [request_seed(3, 1, request) for request in requests]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= request_seed(3, 1, replace(each, sample=4 + 10_000 * ROW)) < 1 << 63 for each in requests)


def test_users_read_where_a_row_begins():
    tokenizer = AutoTokenizer.from_pretrained(tiny.FOLDER)
    words = tokenizer("a b c d e f g h i j k l m n o p q r s t u v")["input_ids"][:12]
    sample = replace(FORKED, token_ids=FORKED.token_ids * 0 + torch.tensor(words, dtype=torch.int32).numpy())
    parts = _parts_of(sample, tokenizer)
    assert [who for who, _ in parts] == [
        "policy",
        "environment",
        "policy",
        "history",
        "policy",
        "environment",
        "policy",
    ]
    assert "".join(text for _, text in parts) == tokenizer.decode(words)
    shown = {"split": "rollout", "uid": 7, "sample": 2, "prompt": "p", "response": "r", "score": 1.0, "length": 12}
    text = as_text(shown | {"rows": 2, "parts": parts, "finish_reason": "stop"})
    assert "12 tokens in 2 rows (stop)" in text
    assert "> history:" in text
    assert "12 tokens (stop)" in as_text(shown | {"rows": 1, "finish_reason": "stop"})
