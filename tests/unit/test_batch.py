"""Batches and micro-batches of samples: every sample once, nothing but padding trimmed."""

import random
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from rlhf.experience.collate import collate
from rlhf.experience.groups import Group
from rlhf.learning.credit import scores_on_last_tokens
from rlhf.reward import RewardResult
from rlhf.rollout import Sample
from tests.support.tiny_updates import EveryBatch

PAD = 99
VERSION = 9
PER_TOKEN = (
    "loss_mask",
    "chosen",
    "token_rewards",
    "advantages",
    "returns",
    "values",
    "old_log_probs",
    "ref_log_probs",
)
CPU = torch.device("cpu")


def group_of(uid: int, prompt: list[int], samples: list[Sample], scores: list[float], baseline: float | None) -> Group:
    """A group in which half of each score is the over-long punishment."""
    results = [RewardResult(score / 2, {"sums": score}) for score in scores]
    return Group(uid, prompt, samples, results, [score / 2 for score in scores], baseline)


def random_groups(seed: int, prompts: int = 5, n: int = 3, *, baseline: bool = True) -> list[Group]:
    """Return groups whose token ids, scores and baselines are unique, so that a misplaced value shows."""
    rng, ids = random.Random(seed), iter(range(100, 10_000))
    groups = []
    for place, uid in enumerate(range(70, 70 + prompts)):
        prompt, samples = [next(ids) for _ in range(rng.randint(1, 8))], []
        for number in range(n):
            tokens = [next(ids) for _ in range(rng.randint(1, 6))]
            log_probs = [-token / 100 for token in tokens]
            spans = ((0, 1), (2, len(tokens))) if len(tokens) > 3 else ()
            sample = Sample.of(uid, number, tokens, log_probs, "length", VERSION - place, spans)
            if place and len(tokens) > 1:  # the policy of the next step continued the response
                sample = replace(sample, versions=((VERSION - place, 1), (VERSION - place + 1, len(tokens))))
            samples.append(sample)
        scores = [float(place * n + number) for number in range(n)]
        groups.append(group_of(uid, prompt, samples, scores, place / 4 if baseline else None))
    return groups


def mask_of(sample: Sample) -> list[float]:
    """Return 1 for each token that the policy wrote, and 0 for each observed token."""
    observed = {place for start, end in sample.observations for place in range(start, end)}
    return [float(place not in observed) for place in range(len(sample))]


def full_batch(seed: int) -> tuple[list[Group], EveryBatch]:
    """Return groups and their batch; every optional tensor has values that identify row and token."""
    groups = random_groups(seed)
    batch = EveryBatch(**collate(groups, PAD, VERSION, CPU).present())
    for number, name in enumerate(PER_TOKEN, 1):
        setattr(batch, name, batch.rollout_log_probs + 1000 * number)
    return groups, batch


def check_row(batch: EveryBatch, row: int, number: int, groups: list[Group]) -> None:
    """Check that row `row` of `batch` has the data of sample `number`, counted over all groups."""
    group, sample = [(group, sample) for group in groups for sample in group.samples][number]
    prompt = group.prompt_ids
    whole, count = [*prompt, *sample.token_ids.tolist()], len(sample)
    assert batch.input_ids[row].tolist()[: len(whole)] == whole
    assert set(batch.input_ids[row].tolist()[len(whole) :]) <= {PAD}
    assert (int(batch.prompt_lengths[row]), int(batch.response_lengths[row])) == (len(prompt), count)
    assert batch.response_mask[row].tolist() == mask_of(sample) + [0.0] * (batch.response_mask.shape[1] - count)
    expected = torch.tensor(sample.log_probs)
    assert torch.equal(batch.rollout_log_probs[row, :count], expected)
    assert not batch.rollout_log_probs[row, count:].any()
    for place, name in enumerate(PER_TOKEN, 1):
        assert torch.equal(getattr(batch, name)[row, :count], expected + 1000 * place)
    assert (batch.scores[row], batch.baselines[row]) == (number, group.baseline)
    assert batch.staleness is not None
    ends = [0, *(end for _, end in sample.versions)]
    ages = [VERSION - v for (v, end), first in zip(sample.versions, ends, strict=False) for _ in range(first, end)]
    assert batch.staleness[row].tolist() == ages + [0] * (batch.staleness.shape[1] - count)


def check_trimmed(batch: EveryBatch) -> None:
    responses = int(batch.response_lengths.max())
    assert batch.input_ids.shape[1] == int((batch.prompt_lengths + batch.response_lengths).max())
    for tensor in (batch.rollout_log_probs, batch.response_mask, *(getattr(batch, name) for name in PER_TOKEN)):
        assert tensor.shape == (len(batch), responses)


@pytest.mark.parametrize("seed", range(5))
def test_collate(seed):
    groups, batch = full_batch(seed)
    assert len(batch) == 15
    for row in range(len(batch)):
        check_row(batch, row, row, groups)
    check_trimmed(batch)
    assert [batch.input_ids.dtype, batch.rollout_log_probs.dtype, batch.scores.dtype] == [
        torch.int32,
        torch.float32,
        torch.float32,
    ]


@pytest.mark.parametrize("rows", [[3], [8, 0, 3], list(range(15))])
def test_a_micro_batch_has_its_rows(rows):
    groups, batch = full_batch(seed=11)
    micro = batch.micro_batch(rows)
    assert len(micro) == len(rows)
    tensors = [micro.prompt_lengths, micro.response_lengths, micro.response_mask.sum(dim=1)]
    assert micro.sizes.tolist() == [tensor.tolist() for tensor in tensors]
    check_trimmed(micro)
    for place, number in enumerate(rows):
        check_row(micro, place, number, groups)


@pytest.mark.parametrize("held", [0, 15])
def test_a_filler_is_one_token_without_a_response(held):
    _, batch = full_batch(seed=11)
    filler = batch.select(slice(held)).micro_batch([])
    assert filler.input_ids.tolist() == [[0]]
    assert (filler.prompt_lengths.tolist(), filler.response_lengths.tolist()) == ([1], [0])
    check_trimmed(filler)
    assert filler.response_mask.numel() == 0
    for name, whole in batch.present().items():
        one = getattr(filler, name)
        assert (one.dtype, one.device, len(one)) == (whole.dtype, whole.device, 1)


@pytest.mark.parametrize("rows", [slice(2, 5), torch.tensor([7]), torch.tensor([8, 0, 3])])
def test_select(rows):
    groups, batch = full_batch(seed=12)
    picked = batch.select(rows)
    check_trimmed(picked)
    for place, number in enumerate(torch.arange(len(batch))[rows].tolist()):
        check_row(picked, place, number, groups)


def test_select_leaves_the_batch_alone_and_keeps_missing_tensors_missing():
    batch = EveryBatch(**collate(random_groups(seed=13, baseline=False), PAD, VERSION, CPU).present())
    before = {f.name: v.clone() for f in fields(batch) if isinstance(v := getattr(batch, f.name), Tensor)}
    picked = batch.select(torch.tensor([0]))
    assert [getattr(picked, name) for name in ("baselines", *PER_TOKEN)] == [None] * (1 + len(PER_TOKEN))
    assert all(torch.equal(getattr(batch, name), value) for name, value in before.items())


def test_scores_are_placed_on_the_last_written_token():
    lengths, scores = [3, 0, 1, 4, 4, 2, 4], [0.5, 7.0, -2.0, 0.0, 1.5, 9.0, 2.5]
    observations = {4: ((0, 1), (2, 4)), 5: ((0, 2),), 6: ((1, 3),)}
    groups = [
        group_of(
            uid,
            [1, 2],
            [Sample.of(uid, 0, [5] * length, [-1.0] * length, "stop", 0, observations.get(uid, ()))],
            [score],
            None,
        )
        for uid, (length, score) in enumerate(zip(lengths, scores, strict=True))
    ]
    batch = collate(groups, PAD, VERSION, CPU)
    rewards = scores_on_last_tokens(batch.scores, batch.response_mask)
    assert rewards.dtype == torch.float32
    assert rewards.tolist() == [
        [0, 0, 0.5, 0],
        [0, 0, 0, 0],
        [-2, 0, 0, 0],
        [0, 0, 0, 0],
        [0, 1.5, 0, 0],
        [0, 0, 0, 0],
        [0, 0, 0, 2.5],
    ]
    assert not rewards[~batch.response_mask].any()


@pytest.mark.parametrize("spans", [((0, 4),), ((2, 1),), ((1, 2), (0, 1)), ((-1, 2),)])
def test_observation_spans_outside_the_response_are_rejected(spans):
    with pytest.raises(ValueError, match="are not spans of 3 tokens"):
        Sample.of(0, 0, [1, 2, 3], [-1.0] * 3, "stop", 0, spans)
