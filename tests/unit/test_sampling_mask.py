"""Sampling masks: the kept tokens, and their way through parts of samples, files and batches."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlhf import loop
from rlhf.experience.collate import collate, collate_masks, mask_width
from rlhf.experience.episode import new_part, with_head
from rlhf.experience.groups import Group, from_tensors, to_tensors
from rlhf.learning.credit import Credit
from rlhf.learning.resharding import SampleResharder
from rlhf.ranks.phase_clock import PhaseClock
from rlhf.reward import RewardResult
from rlhf.rollout import Sample, SamplingParams
from rlhf.rollout.engine import Request
from rlhf.rollout.sample_codec import from_arrays, from_bytes, layout_of, to_arrays, to_bytes
from rlhf.rollout.sampling import fold, row_keys, sample, sample_with_mask
from rlhf.rollout.sampling_mask import SamplingMask, joined_masks, mask_part
from rlhf.rollout.stop_strings import cut_at_seam
from tests.support.thread_ranks import make_coordinator

CPU = torch.device("cpu")
ROWS = [[3, 1], [4], [], [5, 9, 2, 6], [5]]
"""Kept tokens of five tokens, the third of which is an observation."""


def mask_of(rows: list[list[int]]) -> SamplingMask:
    made = SamplingMask.of_tokens([np.array(row, np.int32) for row in rows])
    assert made is not None
    return made


def rows_of(mask: SamplingMask | None) -> list[list[int]] | None:
    return None if mask is None else [[token for token in row if token >= 0] for row in mask.rows(7).tolist()]


MASKED = replace(Sample.of(7, 2, range(5), [-1.0] * 5, "stop", 3, [(2, 3)]), sampling_mask=mask_of(ROWS))
PLAIN = Sample.of(7, 3, range(3), [-1.0] * 3, "length", 3)
FORKED = replace(Sample.of(7, 2, range(12), [-1.0] * 12, "stop", 0, [(2, 3), (4, 8), (9, 10)]), forks=((4, 3),))
"""The history of the second row has four tokens, three of which are its prompt."""


def by_definition(logits: list[float], params: SamplingParams) -> list[int]:
    """Return the tokens that `params` keep, likeliest first."""
    weights = np.exp(np.array(logits, np.float64) / params.temperature)
    probs = weights / weights.sum()
    kept = [int(i) for i in np.argsort(-probs, kind="stable") if probs[i] >= params.min_p * probs.max()]
    kept = kept[: params.top_k]
    shares = probs[kept] / probs[kept].sum()
    return [token for token, before in zip(kept, np.cumsum(shares) - shares, strict=True) if before < params.top_p]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_k=5),
        SamplingParams(top_k=9, top_p=0.7, temperature=1.3),
        SamplingParams(top_k=9, min_p=0.1, temperature=0.7),
        SamplingParams(top_k=20, min_p=0.02, top_p=0.9),
        SamplingParams(top_k=99, min_p=0.02),
        SamplingParams(top_k=99),
    ],
)
def test_the_kept_tokens(params):
    rows, vocab = 64, 30
    logits = 2 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(1))
    index = torch.arange(rows)
    keys = fold(row_keys(5, 6, index, index), torch.zeros_like(index))
    tokens, log_probs, kept = sample_with_mask(logits, keys, params)
    assert (kept.dtype, kept.shape) == (torch.int32, (rows, min(params.top_k, vocab)))
    for found, row, token in zip(kept.tolist(), logits.tolist(), tokens.tolist(), strict=True):
        assert sorted(t for t in found if t >= 0) == sorted(by_definition(row, params))
        assert token in found
    plain: tuple[Tensor, Tensor] = sample(logits, keys, params)
    assert torch.equal(tokens, plain[0])
    assert torch.equal(log_probs.view(torch.int32), plain[1].view(torch.int32)), "a mask changes no bit of a sample"


def test_parts_of_a_mask_and_their_join():
    mask = MASKED.sampling_mask
    assert rows_of(mask) == ROWS
    for start in range(6):
        for end in range(start, 6):
            part = mask_part(mask, start, end)
            assert rows_of(part) == (ROWS[start:end] if any(ROWS[start:end]) else None)
    assert rows_of(joined_masks([(None, 2), (mask, 5), (None, 0), (mask_part(mask, 0, 1), 1)])) == [
        *([], []),
        *ROWS,
        ROWS[0],
    ]
    assert joined_masks([(None, 2), (None, 3)]) is None
    assert mask_part(None, 0, 3) is None


@pytest.mark.parametrize(
    ("counts", "token_ids"), [([1, 2], [5, 6]), ([1, -1, 2], [5, 6]), ([0, 0], []), ([1], [5, 6]), ([], [])]
)
def test_a_mask_whose_counts_contradict_its_token_ids_is_an_error(counts, token_ids):
    with pytest.raises(ValueError, match="sampling masks"):
        SamplingMask(np.array(counts, np.int32), np.array(token_ids, np.int32))


def test_a_mask_of_another_length_is_an_error():
    with pytest.raises(ValueError, match="5 sampling masks for 3 tokens"):
        replace(PLAIN, sampling_mask=MASKED.sampling_mask)


def test_samples_with_other_masks_differ():
    assert replace(MASKED, sampling_mask=mask_of(ROWS)) == MASKED
    for other in (None, mask_of([*ROWS[:4], [6]]), mask_of([[3], [1, 4], *ROWS[2:]])):
        assert replace(MASKED, sampling_mask=other) != MASKED


def test_a_continued_response_has_the_masks_of_both_engines():
    request = Request(7, [1], SamplingParams(), 2, replace(MASKED, finish_reason="partial"))
    new = mask_of([[8, 7], [9]])
    assert rows_of(request.answered([7, 9], [-1, -1], "stop", 4, new).sampling_mask) == [*ROWS, [8, 7], [9]]
    assert rows_of(request.answered([7, 9], [-1, -1], "stop", 4).sampling_mask) == [*ROWS, [], []]
    first = Request(7, [1], SamplingParams()).answered([7, 9], [-1, -1], "stop", 4, new)
    assert rows_of(first.sampling_mask) == [[8, 7], [9]]


def test_a_response_that_is_cut_at_a_stop_string_keeps_the_masks_before_it():
    class Letters:
        def decode(self, token_ids: list[int], **_: bool) -> str:
            return "".join("abcdefgh"[token] for token in token_ids)

    params = SamplingParams(stop=("ef",), max_tokens=9)
    request = Request(7, [1], params, 2, replace(MASKED, observations=(), finish_reason="partial"))
    whole = request.answered([5, 6], [-1, -1], "length", 3, mask_of([[5, 1], [6]]))
    assert rows_of(cut_at_seam(whole, request, Letters()).sampling_mask) == [*ROWS, [5, 1]]


def test_turns_heads_and_rows_of_forked_samples_keep_their_masks():
    assert rows_of(new_part(MASKED, 3).sampling_mask) == ROWS[3:]
    assert rows_of(with_head(MASKED, [60, 61]).sampling_mask) == [[], [], *ROWS]
    kept = [[] if observed else [token, 40] for token, observed in zip(range(12), ~FORKED.mask(), strict=True)]
    first, second = replace(FORKED, sampling_mask=mask_of(kept)).rows([50])
    assert rows_of(first.response.sampling_mask) == kept[:4]
    assert rows_of(second.response.sampling_mask) == kept[7:]


@pytest.mark.parametrize("samples", [[MASKED], [PLAIN, MASKED, PLAIN, MASKED], [PLAIN], []])
def test_masks_survive_their_encoding(samples):
    arrays = to_arrays(samples)
    assert from_arrays(arrays) == samples
    assert from_arrays(from_bytes(b"".join(to_bytes(arrays)), layout_of(arrays))) == samples
    # Without masks, the form in files and on the wire is that of earlier releases.
    assert ("mask_counts" in arrays) == (MASKED in samples)
    groups = [Group(7, [1, 2], samples, [RewardResult(1.0, {"a": 1.0})] * len(samples), [0.0] * len(samples), None)]
    assert [group.samples for group in from_tensors(to_tensors(groups, "x."), "x.")] == [samples]


@pytest.mark.parametrize("name", ["mask_counts", "mask_token_ids"])
def test_arrays_of_masks_that_contradict_the_samples_are_an_error(name):
    arrays = to_arrays([MASKED, PLAIN])
    with pytest.raises(ValueError, match="their rows need"):
        from_arrays(arrays | {name: arrays[name][:-1]})


def test_the_masks_of_a_batch():
    """The batch has a row per row of a sample, and the micro-batch of a rank without samples has no token."""
    kept = [[] if observed else [token] * 2 for token, observed in zip(range(12), ~FORKED.mask(), strict=True)]
    samples = [PLAIN, replace(FORKED, sampling_mask=mask_of(kept)), MASKED]
    groups = [Group(7, [1, 2], samples, [RewardResult(1.0, {"a": 1.0})] * 3, [0.0] * 3, None)]
    batch = collate(groups, 0, 5, CPU)
    assert (mask_width(groups), mask_width([])) == (4, 0)
    assert collate_masks(groups, 0, batch) is None
    batch.sampling_mask = collate_masks(groups, 5, batch)
    assert batch.sampling_mask is not None
    assert (batch.sampling_mask.dtype, batch.sampling_mask.shape) == (torch.int32, (4, 5, 5))
    found = [[[t for t in token if t >= 0] for token in row] for row in batch.sampling_mask.tolist()]
    assert found == [[[]] * 5, [*kept[:4], []], kept[7:], ROWS]
    picked = batch.select(torch.tensor([1, 0]))
    assert torch.equal(picked.sampling_mask, batch.sampling_mask[[1, 0], :4])
    assert batch.micro_batch([]).sampling_mask.shape == (1, 0, 5)
    assert collate_masks([], 5, collate([], 0, 5, CPU)).shape == (0, 0, 5)


def test_the_critic_gets_no_masks():
    """The critic's values need no masks, which are the largest tensor of a batch and would move in each epoch."""
    groups = [Group(7, [1, 2], [MASKED, PLAIN], [RewardResult(1.0, {"a": 1.0})] * 2, [1.0, 0.0], None)]
    rollout = collate(groups, 0, 5, CPU)
    rollout.sampling_mask = collate_masks(groups, 4, rollout)
    zeros = torch.zeros(rollout.response_mask.shape)
    c: Any = SimpleNamespace(
        clock=PhaseClock(CPU),
        reference=None,
        needs_old_log_probs=False,
        critic=SimpleNamespace(on_device=nullcontext, all_values=lambda *_: zeros),
        advantages=SimpleNamespace(
            uses_kl=False, estimate=lambda *_: (Credit(zeros, zeros, rollout.response_mask), {})
        ),
        guards=None,
    )
    training = SampleResharder(1, make_coordinator()).reshard(rollout, [7, 7], 1)
    (of_actor, of_critic), _, _ = loop.estimate(c, rollout, training)
    assert torch.equal(of_actor.sampling_mask, rollout.sampling_mask)
    assert of_critic.sampling_mask is None
