"""From samples to tensors and to micro-batches: every sample once, nothing but padding trimmed."""

import random
from dataclasses import fields

import pytest
import torch
from torch import Tensor

from rlhf.batch import Batch, collate
from rlhf.rollout import Request, Sample

PAD = 99
PER_TOKEN = ("token_rewards", "advantages", "returns", "values", "old_log_probs", "ref_log_probs")
CPU = torch.device("cpu")


def random_samples(seed: int, prompts: int = 5, n: int = 3) -> tuple[list[Request], list[Sample]]:
    """Token ids are unique over the whole batch, so that a misplaced one shows."""
    rng, ids = random.Random(seed), iter(range(100, 10_000))
    requests = [Request(70 + uid, [next(ids) for _ in range(rng.randint(1, 8))]) for uid in range(prompts)]
    samples = []
    for request in requests:
        for number in range(n):
            tokens = [next(ids) for _ in range(rng.randint(1, 6))]
            log_probs = [-token / 100 for token in tokens]
            samples.append(Sample(request.uid, number, tokens, log_probs, "length"))
    return requests, samples


def full_batch(seed: int) -> tuple[list[Request], list[Sample], Batch]:
    """A batch with every optional tensor filled by a value that tells its row and token."""
    requests, samples = random_samples(seed)
    batch = collate(requests, samples, PAD, CPU)
    batch.scores = torch.arange(len(batch)).float()
    batch.baselines = batch.scores * 10
    for number, name in enumerate(PER_TOKEN, 1):
        setattr(batch, name, batch.rollout_log_probs + 1000 * number)
    return requests, samples, batch


def check_row(batch: Batch, row: int, number: int, prompt: list[int], sample: Sample) -> None:
    """Row `row` of `batch` is sample `number` of the whole, with its numbers in their places."""
    whole, count = [*prompt, *sample.token_ids], len(sample.token_ids)
    assert batch.input_ids[row].tolist()[: len(whole)] == whole
    assert set(batch.input_ids[row].tolist()[len(whole) :]) <= {PAD}
    assert (int(batch.prompt_lengths[row]), int(batch.response_lengths[row])) == (len(prompt), count)
    assert batch.response_mask[row].tolist() == [float(i < count) for i in range(batch.rollout_log_probs.shape[1])]
    expected = torch.tensor(sample.log_probs)
    assert torch.equal(batch.rollout_log_probs[row, :count], expected)
    assert not batch.rollout_log_probs[row, count:].any()
    for place, name in enumerate(PER_TOKEN, 1):
        assert torch.equal(getattr(batch, name)[row, :count], expected + 1000 * place)
    assert (batch.scores[row], batch.baselines[row]) == (number, number * 10)


def prompts_of(requests: list[Request]) -> dict[int, list[int]]:
    return {request.uid: request.token_ids for request in requests}


def check_trimmed(batch: Batch) -> None:
    responses = int(batch.response_lengths.max())
    assert batch.input_ids.shape[1] == int((batch.prompt_lengths + batch.response_lengths).max())
    for tensor in (batch.rollout_log_probs, batch.response_mask, *(getattr(batch, name) for name in PER_TOKEN)):
        assert tensor.shape == (len(batch), responses)


@pytest.mark.parametrize("seed", range(5))
def test_collate(seed):
    requests, samples, batch = full_batch(seed)
    assert len(batch) == len(samples)
    for row, sample in enumerate(samples):
        check_row(batch, row, row, prompts_of(requests)[sample.uid], sample)
    check_trimmed(batch)
    assert [batch.input_ids.dtype, batch.rollout_log_probs.dtype, batch.scores.dtype] == [
        torch.int64,
        torch.float32,
        torch.float32,
    ]


@pytest.mark.parametrize("size", [1, 4, 15, 100])
def test_micro_batches_hold_every_sample_once(size):
    requests, samples, batch = full_batch(seed=11)
    seen: list[int] = []
    for rows, micro in batch.micro_batches(size):
        assert len(micro) == len(rows) <= size
        check_trimmed(micro)
        for place, number in enumerate(rows.tolist()):
            check_row(micro, place, number, prompts_of(requests)[samples[number].uid], samples[number])
        seen += rows.tolist()
    assert sorted(seen) == list(range(len(samples)))
    lengths = (batch.prompt_lengths + batch.response_lengths)[seen]
    assert (lengths.diff() >= 0).all(), "sequences of like length belong together"


@pytest.mark.parametrize("rows", [slice(2, 5), torch.tensor([7]), torch.tensor([8, 0, 3])])
def test_select(rows):
    requests, samples, batch = full_batch(seed=12)
    picked = batch.select(rows)
    check_trimmed(picked)
    for place, number in enumerate(torch.arange(len(samples))[rows].tolist()):
        check_row(picked, place, number, prompts_of(requests)[samples[number].uid], samples[number])


def test_select_leaves_the_batch_alone_and_keeps_missing_tensors_missing():
    requests, samples = random_samples(seed=13)
    batch = collate(requests, samples, PAD, CPU)
    before = {f.name: v.clone() for f in fields(batch) if isinstance(v := getattr(batch, f.name), Tensor)}
    picked = batch.select(torch.tensor([0]))
    assert [getattr(picked, name) for name in ("baselines", *PER_TOKEN)] == [None] * (1 + len(PER_TOKEN))
    assert all(torch.equal(getattr(batch, name), value) for name, value in before.items())


def test_scores_lie_on_the_last_token_and_nowhere_without_tokens():
    lengths, scores = [3, 0, 1, 4], [0.5, 7.0, -2.0, 0.0]
    requests = [Request(uid, [1, 2]) for uid in range(4)]
    samples = [Sample(uid, 0, [5] * length, [-1.0] * length, "stop") for uid, length in enumerate(lengths)]
    batch = collate(requests, samples, PAD, CPU)
    batch.scores = torch.tensor(scores)
    rewards = batch.scores_on_last_tokens()
    assert rewards.dtype == torch.float32
    assert rewards.tolist() == [[0, 0, 0.5, 0], [0, 0, 0, 0], [-2, 0, 0, 0], [0, 0, 0, 0]]
    assert not (rewards * (1 - batch.response_mask)).any()
