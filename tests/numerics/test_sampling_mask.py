"""Log-probs over sampling masks: values, gradients, agreement with the engine, and an unbiased policy gradient."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from rlhf.algorithms import token_log_probs as module
from rlhf.algorithms.token_log_probs import Finish, token_log_probs
from rlhf.batch import Batch
from rlhf.experience.collate import collate, collate_masks
from rlhf.experience.groups import Group
from rlhf.learning.policy import response_log_probs
from rlhf.models import tiny
from rlhf.models.log_prob_head import with_log_probs
from rlhf.models.packing import pack
from rlhf.reward import RewardResult
from rlhf.rollout import Request, SamplingParams
from rlhf.rollout.sampling import sample_with_mask
from tests.support.in_float64 import TOLERANCE, in_float64
from tests.support.played import Sampler
from tests.support.rounding import sum_bound
from tests.support.sampled import asking
from tests.support.tiny_updates import tiny_qwen2

TOKENS, HIDDEN, VOCAB, TEMPERATURE = 50, 7, 31, 0.7
TERMS = TOKENS + HIDDEN + VOCAB
"""Terms of the sums in a gradient: over tokens, in the product and in the softmax."""
PARAMS = SamplingParams(max_tokens=24, temperature=3.0, top_k=12, top_p=0.95, min_p=0.01, sampling_mask=True)


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


def gradients(inputs: Sequence[Tensor], log_probs: Tensor, entropy: Tensor | None) -> tuple[Tensor, ...]:
    weights = torch.linspace(-1, 2, TOKENS, dtype=log_probs.dtype)
    loss = (log_probs * weights).sum()
    if entropy is not None:
        loss = loss + (entropy * weights.flip(0)).sum()
    return torch.autograd.grad(loss, inputs)


def random_kept(labels: Tensor, width: int) -> Tensor:
    """Return up to `width` kept tokens of each label, with the label and any padding in any column.

    The first rows keep one token, all of the columns, and the whole vocabulary.
    """
    generator = torch.Generator().manual_seed(2)
    kept = torch.stack([torch.randperm(VOCAB, generator=generator)[:width] for _ in labels]).int()
    kept[torch.rand(kept.shape, generator=generator) < 0.4] = -1
    has_label = (kept == labels[:, None]).any(dim=1)
    columns = torch.randint(width, labels.shape, generator=generator)
    rows = torch.arange(len(labels))
    kept[rows, columns] = torch.where(has_label, kept[rows, columns], labels.int())
    kept[0] = -1
    kept[0, 2] = labels[0]
    kept[1] = torch.arange(4, 4 + width)
    labels[1] = 5
    kept[2] = -1
    return kept


def plain(
    hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, finish: Finish | None, kept: Tensor
) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies of one token at a time, from the logits of its kept tokens alone."""
    logits = linear(hidden, weight, bias)
    logits = (logits if finish is None else finish(logits)) / TEMPERATURE
    log_probs, entropies = [], []
    for row, label, ids in zip(logits, labels.tolist(), kept.tolist(), strict=True):
        tokens = sorted({i for i in ids if i >= 0}) or list(range(VOCAB))
        tokens = [token for token in tokens if row[token] > -torch.inf]
        every = row[tokens] - row[tokens].exp().sum().log()
        log_probs.append(every[tokens.index(label)])
        entropies.append(-(every.exp() * every).sum())
    return torch.stack(log_probs), torch.stack(entropies)


@pytest.mark.parametrize("chunk", [1 << 24, 7 * VOCAB, 1])
@pytest.mark.parametrize("finish", [None, soft_capped])
@pytest.mark.parametrize("entropy_in_loss", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, sum_bound(TERMS))])
def test_values_and_gradients(chunk, finish, entropy_in_loss, dtype, tolerance, monkeypatch):
    monkeypatch.setitem(module.CHUNK_ELEMENTS, "cpu", chunk)
    *inputs, labels = drawn(dtype)
    kept = random_kept(labels, 6)
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = plain(*exact, labels, finish, kept)
    hidden, weight, bias = inputs
    options: dict[str, Any] = {"weight": weight, "bias": bias, "finish": finish, "kept": kept}
    found = token_log_probs(hidden, labels, TEMPERATURE, **options, with_entropy=True)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, check_dtype=False)
    for gradient, true in zip(
        gradients(inputs, found[0], found[1] if entropy_in_loss else None),
        gradients(exact, expected[0], expected[1] if entropy_in_loss else None),
        strict=True,
    ):
        largest = true.abs().max().item()
        torch.testing.assert_close(gradient, true, rtol=0, atol=tolerance * largest, check_dtype=False)
    without, _ = token_log_probs(hidden, labels, TEMPERATURE, **options, with_entropy=False)
    assert torch.equal(without, found[0])


def batch_of(requests: list[Request], samples: list[Any]) -> Batch:
    """Return the batch of samples, one group for each."""
    groups = [
        Group(request.uid, request.token_ids, [sample], [RewardResult(0.0, {})], [0.0], None)
        for request, sample in zip(requests, samples, strict=True)
    ]
    batch = collate(groups, 0, 0, torch.device("cpu"))
    batch.sampling_mask = collate_masks(groups, PARAMS.top_k, batch)
    return batch


def prompts(sampler: Sampler) -> list[Request]:
    ids = tiny.prompt_ids(sampler.tokenizer, [tiny.QUESTION.format(28 + i, "+", 3**i) for i in range(5)])
    return [Request(uid, token_ids) for uid, token_ids in enumerate(ids)]


@pytest.mark.parametrize("packed", [False, True])
def test_log_probs_of_engine_and_trainer_agree(packed):
    sampler = Sampler()
    engine = sampler.engine
    requests = asking(prompts(sampler), PARAMS, 6)
    batch = batch_of(requests, engine.generate(requests, seed=3, step=1))
    model = with_log_probs(engine.model)
    if packed:
        pack(model)
    with torch.no_grad():
        found, entropy = response_log_probs(model, batch, PARAMS.temperature, with_entropy=True)
        whole, _ = response_log_probs(model, replace(batch, sampling_mask=None), PARAMS.temperature, with_entropy=False)
    torch.testing.assert_close(found, batch.rollout_log_probs, rtol=0, atol=1e-5)
    assert (whole - batch.rollout_log_probs).min() < -0.1
    assert entropy is not None
    assert batch.sampling_mask is not None
    sizes = (batch.sampling_mask >= 0).sum(dim=2).clamp(min=1)
    assert (entropy <= sizes.log() + 1e-5).all()
    assert sizes.max() > sizes[batch.response_mask].min()


@in_float64()
def test_a_continued_response_has_the_masks_of_an_uninterrupted_one():
    sampler = Sampler()
    engine = sampler.engine
    engine.model.double()
    requests = asking(prompts(sampler), PARAMS, 3)
    whole = engine.generate(requests, seed=1, step=2)
    for cut in (1, 2, 5):
        begun = [
            replace(request, response=replace(sample.part(0, cut, 0), finish_reason="partial"))
            if len(sample) > cut
            else request
            for request, sample in zip(requests, whole, strict=True)
        ]
        for found, expected in zip(engine.generate(begun, seed=1, step=2), whole, strict=True):
            assert replace(found, log_probs=expected.log_probs) == expected


REWARDS = torch.randn(40, 40, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
"""Reward of each response of two tokens."""
PROMPT = [3, 5, 7]
TRUNCATED = SamplingParams(temperature=0.8, top_k=4, top_p=0.9, sampling_mask=True)


def logits_after(model: nn.Module, tokens: list[int]) -> Tensor:
    return model(input_ids=torch.tensor([PROMPT + tokens]), use_cache=False).logits[0, -1] / TRUNCATED.temperature


def kept_after(model: nn.Module, tokens: list[int]) -> list[int]:
    """Return the tokens that the engine keeps after the prompt and `tokens`."""
    with torch.no_grad():
        logits = logits_after(model, tokens)[None] * TRUNCATED.temperature
    kept = sample_with_mask(logits, torch.zeros(1, dtype=torch.int64), TRUNCATED)[2]
    return [token for token in kept[0].tolist() if token >= 0]


def responses(model: nn.Module) -> Iterator[tuple[list[int], list[list[int]]]]:
    """Yield all responses of two tokens that can be sampled, each with the kept tokens of both positions."""
    first = kept_after(model, [])
    for token in first:
        second = kept_after(model, [token])
        yield from (([token, last], [first, second]) for last in second)


def probability(model: nn.Module, response: list[int], kept: list[list[int]]) -> Tensor:
    """Return the probability with which `TRUNCATED` samples a response."""
    probs = torch.ones((), dtype=torch.float64)
    for position, tokens in enumerate(kept):
        of_kept = logits_after(model, response[:position])[tokens].softmax(0)
        probs = probs * of_kept[tokens.index(response[position])]
    return probs


def gradient_of(model: nn.Module, objective: Tensor) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(objective, list(model.parameters()))])


@in_float64()
def test_the_expected_policy_gradient_is_that_of_the_sampled_policy():
    """By enumeration: the expectation of reward times the gradient of the log-probs over masks equals the gradient of
    the expected reward. Over the whole vocabulary, it does not."""
    model = tiny_qwen2().double()
    rows = list(responses(model))
    assert len(rows) > 6
    assert len({len(tokens) for _, kept in rows for tokens in kept}) > 1, "top_p removes some of the top_k tokens"
    rewards = torch.stack([REWARDS[tuple(response)] for response, _ in rows])
    probs = torch.stack([probability(model, *row) for row in rows])
    torch.testing.assert_close(probs.sum(), torch.ones_like(probs.sum()), rtol=TOLERANCE, atol=TOLERANCE)
    expected = gradient_of(model, (probs * rewards).sum())
    masks = [[tokens + [-1] * (TRUNCATED.top_k - len(tokens)) for tokens in kept] for _, kept in rows]
    count = torch.full((len(rows),), 2)
    batch = Batch(
        input_ids=torch.tensor([PROMPT + response for response, _ in rows]),
        prompt_lengths=count + 1,
        response_lengths=count,
        response_mask=torch.ones(len(rows), 2, dtype=torch.bool),
        rollout_log_probs=torch.zeros(len(rows), 2),
        uids=count,
        numbers=count,
        sampling_mask=torch.tensor(masks, dtype=torch.int32),
    )
    weights = probs.detach() * rewards
    found = {}
    for name, each in {"kept": batch, "whole": replace(batch, sampling_mask=None)}.items():
        log_probs, _ = response_log_probs(with_log_probs(model), each, TRUNCATED.temperature, with_entropy=False)
        found[name] = gradient_of(model, (weights * log_probs.sum(dim=1)).sum())
    torch.testing.assert_close(found["kept"], expected, rtol=TOLERANCE, atol=TOLERANCE * expected.abs().max().item())
    assert (found["whole"] - expected).norm() > 0.1 * expected.norm()


@in_float64()
def test_the_kl_to_the_reference_is_that_of_both_policies_over_the_kept_tokens():
    policy, reference = tiny_qwen2().double(), tiny_qwen2(seed=1).double()
    kept = kept_after(policy, [])
    rows = torch.tensor([[*PROMPT, token] for token in kept])
    one = torch.ones(len(kept), dtype=torch.int64)
    batch = Batch(
        input_ids=rows,
        prompt_lengths=3 * one,
        response_lengths=one,
        response_mask=torch.ones(len(kept), 1, dtype=torch.bool),
        rollout_log_probs=torch.zeros(len(kept), 1),
        uids=one,
        numbers=one,
        sampling_mask=torch.tensor([[[*kept, -1]]] * len(kept), dtype=torch.int32),
    )
    with torch.no_grad():
        ours, theirs = (
            response_log_probs(with_log_probs(model), batch, TRUNCATED.temperature, with_entropy=False)[0][:, 0]
            for model in (policy, reference)
        )
        plain_ours, plain_theirs = (logits_after(model, [])[kept].softmax(0).log() for model in (policy, reference))
    torch.testing.assert_close((ours, theirs), (plain_ours, plain_theirs), rtol=TOLERANCE, atol=TOLERANCE)
    assert (ours.exp() * (ours - theirs)).sum() > 0.01
