"""The noise is uniform, independent, a function of its coordinates; samples follow the reported distribution."""

import math

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rlhf.rollout import sampling
from rlhf.rollout.engine import SamplingParams
from rlhf.rollout.sampling import fold, row_keys, sample, uniform
from tests.support.in_float64 import TOLERANCE, in_float64
from tests.support.rounding import log_softmax_bound

VOCAB = 12


def keys_of(seed: int, step: int, rows: int, samples: int = 1) -> Tensor:
    """Keys of `samples` samples of each of `rows` prompts at position 0."""
    index = torch.arange(rows * samples)
    return fold(row_keys(seed, step, index // samples, index % samples), torch.zeros_like(index))


def draw(logits: Tensor, count: int, params: SamplingParams, seed: int = 1) -> tuple[Tensor, Tensor]:
    return sample(logits.expand(count, -1), keys_of(seed, 0, count), params)


def splitmix_reference(seed: int, step: int, uid: int, number: int, position: int, token: int) -> float:
    """Compute the same uniform number with Python's integers."""
    mask, golden = (1 << 64) - 1, 0x9E3779B97F4A7C15

    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        return z ^ (z >> 31)

    key = golden
    for value in (seed, step, uid, number, position, token):
        key = mix((key + value * golden) & mask)
    return min(((key >> 11) + 0.5) * 2.0**-53, 1 - 2.0**-53)


def allowed_reference(logits: Tensor, params: SamplingParams) -> dict[int, float]:
    """Token -> probability after temperature, min-p, top-k and top-p, by plain Python."""
    scaled = [x / params.temperature for x in logits.tolist()]
    ranked = sorted(range(len(scaled)), key=lambda t: (-scaled[t], t))
    ranked = [t for t in ranked if math.exp(scaled[t] - scaled[ranked[0]]) >= params.min_p]
    if params.top_k > 0:
        ranked = ranked[: params.top_k]
    weights = [math.exp(scaled[t] - scaled[ranked[0]]) for t in ranked]
    kept, mass = 0, 0.0
    while kept == 0 or (kept < len(ranked) and mass / sum(weights) < params.top_p):
        mass += weights[kept]
        kept += 1
    return {t: w / mass for t, w in zip(ranked[:kept], weights[:kept], strict=True)}


def chi_square(observed: Tensor, expected: Tensor) -> float:
    """z-score of Pearson's statistic: near 0 for the right distribution, large for a wrong one."""
    statistic = ((observed - expected) ** 2 / expected).sum().item()
    freedom = len(observed) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


def test_uniform_is_the_documented_hash() -> None:
    for coordinates in [(0, 0, 0, 0, 0, 0), (1, 2, 3, 4, 5, 6), (2**63 + 5, 7, 2**40, 15, 255, 151_935)]:
        seed, step, uid, number, position, token = coordinates
        keys = fold(row_keys(seed, step, torch.tensor([uid]), torch.tensor([number])), torch.tensor([position]))
        assert uniform(keys, torch.tensor([[token]])).item() == splitmix_reference(*coordinates)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_noise_is_the_same_on_cuda() -> None:
    keys, tokens = keys_of(3, 4, 500), torch.arange(1000)[None]
    assert torch.equal(uniform(keys.cuda(), tokens.cuda()).cpu(), uniform(keys, tokens))


def test_noise_is_uniform_in_the_open_interval() -> None:
    noise = uniform(keys_of(0, 0, 1000), torch.arange(1000)[None]).flatten()
    assert noise.min() > 0
    assert noise.max() < 1
    assert abs(chi_square(noise.histc(1000, 0, 1), torch.full((1000,), 1000.0))) < 4
    # Noise near 0 decides the exponential race, so it must be as fine there as elsewhere.
    small = noise[noise < 1e-3]
    assert abs(chi_square(small.histc(20, 0, 1e-3), torch.full((20,), len(small) / 20))) < 4
    assert len(noise.unique()) == len(noise)


@pytest.mark.parametrize("axis", ["seed", "step", "uid", "sample", "position", "token"])
def test_noise_is_independent_along_every_coordinate(axis: str) -> None:
    count, tokens = 300, torch.arange(600)[None]
    ids, zeros = torch.arange(count), torch.zeros(count, dtype=torch.int64)
    if axis in ("seed", "step"):
        pairs = [
            row_keys(i if axis == "seed" else 0, i if axis == "step" else 0, zeros[:1], zeros[:1]) for i in range(count)
        ]
        keys = fold(torch.cat(pairs), zeros)
    elif axis == "position":
        keys = fold(row_keys(0, 0, zeros, zeros), ids)
    else:
        keys = fold(row_keys(0, 0, ids if axis != "sample" else zeros, ids if axis == "sample" else zeros), zeros)
    noise = uniform(keys, tokens)
    if axis == "token":
        noise = noise.T
    x, y = noise[:-1].flatten(), noise[1:].flatten()
    # The correlation of neighbours has standard deviation 1 / sqrt(count). `chi_square` of their cells is a z-score.
    assert abs(torch.corrcoef(torch.stack([x, y]))[0, 1].item()) * math.sqrt(len(x)) < 4
    cells = torch.bincount((x * 8).long() * 8 + (y * 8).long(), minlength=64).double()
    assert abs(chi_square(cells, torch.full((64,), len(x) / 64, dtype=torch.float64))) < 4


def test_noise_does_not_depend_on_the_batch() -> None:
    torch.manual_seed(0)
    logits, keys = torch.randn(700, 300) * 2, keys_of(5, 6, 100, 7)
    tokens, log_probs = sample(logits, keys, SamplingParams())
    order = torch.randperm(700)
    for part in order.split([1, 9, 90, 600]):
        part_tokens, part_log_probs = sample(logits[part], keys[part], SamplingParams())
        assert torch.equal(part_tokens, tokens[part])
        assert torch.equal(part_log_probs, log_probs[part])


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(top_k=4),
        SamplingParams(top_p=0.8),
        SamplingParams(temperature=2.0, top_k=6, top_p=0.7),
        SamplingParams(min_p=0.2),
        SamplingParams(temperature=2.0, min_p=0.4, top_k=6, top_p=0.7),
    ],
)
def test_frequencies_and_log_probs_are_those_of_the_distribution(params: SamplingParams) -> None:
    torch.manual_seed(1)
    logits, count = torch.randn(VOCAB), 200_000
    tokens, log_probs = draw(logits, count, params)
    allowed = allowed_reference(logits, params)
    observed = torch.bincount(tokens, minlength=VOCAB).double()
    assert set(observed.nonzero()[:, 0].tolist()) == set(allowed)
    ids = sorted(allowed)
    expected = torch.tensor([allowed[t] for t in ids], dtype=torch.float64)
    assert abs(chi_square(observed[ids], expected * count)) < 4
    exact = torch.zeros(VOCAB, dtype=torch.float64)
    exact[ids] = expected.log()
    assert log_probs.dtype == torch.float32
    bound = log_softmax_bound(VOCAB, (logits / params.temperature).abs().max().item())
    torch.testing.assert_close(log_probs.double(), exact[tokens], rtol=0, atol=bound)


def test_rare_tokens_are_drawn_as_often_as_they_should() -> None:
    logits = torch.zeros(50)
    logits[1:] = math.log(1e-5)
    tokens, _ = draw(logits, 400_000, SamplingParams())
    expected = 400_000 * 49e-5 / (1 + 49e-5)
    assert abs((tokens > 0).sum().item() - expected) < 4 * math.sqrt(expected)


def test_top_k_and_top_p_keep_exactly_the_reference_set() -> None:
    generator = torch.Generator().manual_seed(2)
    for trial in range(60):
        # Rounded logits have many ties.
        logits = (torch.randn(VOCAB, generator=generator) * 2).round()
        params = SamplingParams(
            temperature=[0.7, 1.0, 1.3][trial % 3],
            top_k=[-1, 0, 1, 3, 8, 50][trial % 6],
            top_p=[1.0, 0.9, 0.31, 1e-6][trial % 4],
            min_p=[0.0, 0.05, 0.3, 0.0, 1.0][trial % 5],
        )
        tokens, log_probs = draw(logits, 4000, params, seed=trial)
        allowed = allowed_reference(logits, params)
        assert set(tokens.tolist()) <= set(allowed)
        assert {t for t, p in allowed.items() if p > 0.01} <= set(tokens.tolist())
        expected = torch.tensor([allowed[t] for t in tokens.tolist()], dtype=torch.float64).log()
        bound = log_softmax_bound(VOCAB, (logits / params.temperature).abs().max().item())
        torch.testing.assert_close(log_probs.double(), expected, rtol=0, atol=bound)


@pytest.mark.parametrize("order", ["min-p, top-k", "min-p, top-p"])
@in_float64()
def test_the_distribution_is_that_of_transformers_processors_in_vllms_order(order: str) -> None:
    """vLLM: the penalty, the temperature, min-p, top-k, top-p (vllm/v1/sample/sampler.py)."""
    rows, vocab = 600, 80
    generator = torch.Generator().manual_seed(11)
    logits = torch.randn(rows, vocab, generator=generator) * 3
    history = torch.randint(vocab, (rows, 30), generator=generator)
    seen = torch.zeros(rows, vocab, dtype=torch.bool).scatter(1, history, True)
    last = {"top_k": 12} if order == "min-p, top-k" else {"top_p": 0.6}
    params = SamplingParams(temperature=1.4, min_p=0.03, repetition_penalty=1.7, **last)
    processors = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(params.repetition_penalty),
            TemperatureLogitsWarper(params.temperature),
            MinPLogitsWarper(params.min_p),
            TopKLogitsWarper(params.top_k) if params.top_k > 0 else TopPLogitsWarper(params.top_p),
        ]
    )
    expected = processors(history, logits.clone()).log_softmax(-1)
    drawn = [sample(logits, keys_of(seed, 0, rows), params, seen) for seed in range(10)]
    for tokens, log_probs in drawn:
        torch.testing.assert_close(log_probs, expected.gather(1, tokens[:, None])[:, 0], rtol=0, atol=TOLERANCE)
    kept = torch.zeros(rows, vocab).scatter(1, torch.stack([tokens for tokens, _ in drawn], 1), 1)
    assert (kept > 0).sum() > 2 * rows, "more than the likeliest are drawn"
    plain = sample(logits, keys_of(0, 0, rows), SamplingParams(temperature=1.4, **last))
    assert not torch.equal(plain[0], drawn[0][0])


def test_a_greedy_token_is_that_after_the_penalty_with_its_log_prob() -> None:
    logits, seen = torch.tensor([[3.0, 2.0, -1.0], [-1.0, -1.1, -9.0]]), torch.tensor([[True, False, False]] * 2)
    tokens, log_probs = sample(logits, keys_of(0, 0, 2), SamplingParams(temperature=0, repetition_penalty=2.0), seen)
    assert tokens.tolist() == [1, 1]
    changed = torch.tensor([[1.5, 2.0, -1.0], [-2.0, -1.1, -9.0]])
    expected = changed.double().log_softmax(-1)[:, 1]
    torch.testing.assert_close(log_probs.double(), expected, rtol=0, atol=log_softmax_bound(3, 9.0))


def awkward_logits(kind: str, rows: int, vocab: int) -> Tensor:
    """Return logits of a kind that is hard to order, such as ties; in "equal" the last row has one value only."""
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(4)) * 3
    if kind == "bfloat16":
        return logits.bfloat16()
    if kind == "rounded":
        return logits.round()
    if kind == "zeros of both signs":
        return logits.clamp(max=0) * torch.tensor([1.0, -1.0]).repeat(vocab // 2)
    if kind == "equal":
        return torch.cat([logits[:-1], torch.ones(1, vocab)])
    if kind == "banned":
        return logits.masked_fill(logits < 5, -torch.inf)
    if kind == "not a number":
        return logits.masked_fill(logits > 7, torch.nan)
    return logits


def sorted_whole(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k likeliest tokens by a stable sort of all."""
    ranked, ids = logits.sort(dim=-1, descending=True, stable=True)
    return ranked[:, :k], ids[:, :k]


@pytest.mark.parametrize(
    "kind", ["float32", "bfloat16", "rounded", "zeros of both signs", "equal", "banned", "not a number"]
)
@pytest.mark.parametrize("top_k", [1, 2, 50, 400, 967, 968, 1999, 2000, 5000])
@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_top_k_is_the_beginning_of_a_stable_sort_to_the_bit(monkeypatch, kind: str, top_k: int, top_p: float) -> None:
    rows, vocab = 40, 2000
    params = SamplingParams(top_k=top_k, top_p=top_p, temperature=1.3)
    logits, keys = awkward_logits(kind, rows, vocab), keys_of(7, 8, rows)
    found, candidates = sampling._likeliest(logits.float(), min(top_k, vocab))
    expected, ids = sorted_whole(logits.float(), min(top_k, vocab))
    assert torch.equal(candidates, ids)
    assert torch.equal(found.contiguous().view(torch.int32), expected.contiguous().view(torch.int32))
    tokens, log_probs = sample(logits, keys, params)
    monkeypatch.setattr(sampling, "_likeliest", sorted_whole)
    expected_tokens, expected_log_probs = sample(logits, keys, params)
    assert torch.equal(tokens, expected_tokens)
    assert torch.equal(log_probs.view(torch.int32), expected_log_probs.view(torch.int32))


def test_greedy_takes_the_first_of_the_likeliest_with_its_plain_log_prob() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]])
    for params in (SamplingParams(temperature=0), SamplingParams(temperature=0, top_k=2, top_p=0.1)):
        tokens, log_probs = sample(logits, keys_of(0, 0, 1), params)
        assert tokens.tolist() == [1]
        expected = logits.double().log_softmax(-1)[:, 1]
        torch.testing.assert_close(log_probs.double(), expected, rtol=0, atol=log_softmax_bound(4, 3.0))


def test_half_precision_logits_are_sampled_in_float32() -> None:
    logits = torch.randn(64, 200, generator=torch.Generator().manual_seed(3)).bfloat16()
    tokens, log_probs = sample(logits, keys_of(0, 0, 64), SamplingParams())
    expected = logits.float().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    assert log_probs.dtype == torch.float32
    assert torch.equal(log_probs, expected)
