"""Groups are equal after a save and a load, and only groups without a difference between samples lack a signal."""

import json
import math
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from rlhf.experience.groups import Group, from_tensors, to_tensors
from rlhf.reward import RewardResult
from rlhf.rollout import Sample
from rlhf.storage.shards import DTYPE_NAMES

AWKWARD = [0.1 + 0.2, -0.0, 1e-320, -math.pi * 1e30, math.nextafter(1, 2), 2.0, 1 / 3]


def group(uid: int, lengths: list[int], **more: Any) -> Group:
    """A group with floats that any rounding would change."""
    samples, results = [], []
    for number, length in enumerate(lengths):
        log_probs = [AWKWARD[(uid + number + i) % len(AWKWARD)] for i in range(length)]
        token_ids = [uid % 1000 + 10 * number + i for i in range(length)]
        spans = ((0, 1), (2, 3)) if length > 2 else ()
        reason = "stop" if number % 2 else "length"
        whole = Sample.of(uid, number, token_ids, log_probs, reason, number + 3, spans)
        samples.append(replace(whole, versions=((number + 3, length // 2), (number + 4, length))))
        terms = {"zweite": AWKWARD[number], "Prüfung": 1.0}
        results.append(
            RewardResult(AWKWARD[-number], terms, {"länge": length / 3}, number % 2, number % 3, {"text": ["ä", None]})
        )
    values: dict[str, Any] = {
        "penalties": [-0.7 * i for i in range(len(lengths))],
        "baseline": None,
    }
    return Group(uid, [uid % 1000] * (1 + uid % 4), samples, results, **(values | more))


def test_the_round_trip_is_exact():
    groups = [group(7, [3, 1, 0, 4]), group(2**40, [2, 2], baseline=0.1 + 0.2), group(9, [0])]
    tensors = to_tensors(groups)
    restored = from_tensors(tensors)
    assert restored == groups
    # Compared as text, because == ignores the sign of -0.0 and the order of names. The first name is the first reward.
    assert [repr(group.results) for group in restored] == [repr(group.results) for group in groups]
    assert all(tensor.dtype in DTYPE_NAMES and tensor.dim() == 1 for tensor in tensors.values())


@pytest.mark.parametrize("name", ["token_ids", "log_probs", "rows", "versions", "observations", "prompt_ids"])
@pytest.mark.parametrize("change", [-6, -2, -1, 1, 2, 6])
def test_tensors_of_inconsistent_lengths_are_rejected(name, change):
    tensors = to_tensors([group(7, [3, 1, 0, 4])])
    values = tensors[name]
    tensors[name] = values[:change] if change < 0 else torch.cat([values, values.new_zeros(change)])
    with pytest.raises(ValueError, match=r"numbers|shape|samples|versions"):
        from_tensors(tensors)


def test_groups_of_format_7_are_read():
    """Release 0.1.0 stored prompts among the token ids, log-probs in float64, and all else of a sample in JSON."""
    records = [
        {
            "uid": 5,
            "baseline": 0.25,
            "penalties": [0.0, -0.5],
            "prompt_length": 2,
            "response_lengths": [3, 1],
            "finish_reasons": ["stop", "length"],
            "versions": [4, 4],
            "observations": [[[1, 2]], []],
            "results": [asdict(RewardResult(score, {"f": score})) for score in (1.0, 0.0)],
        }
    ]
    tensors = {
        "token_ids": torch.tensor([8, 9, 1, 2, 3, 7]),
        "log_probs": torch.tensor([-0.5, -0.1, -0.25, -2.0], dtype=torch.float64),
        "records": torch.tensor(list(json.dumps(records).encode()), dtype=torch.uint8),
    }
    samples = [
        Sample.of(5, 0, [1, 2, 3], [-0.5, -0.1, -0.25], "stop", 4, [(1, 2)]),
        Sample.of(5, 1, [7], [-2.0], "length", 4),
    ]
    results = [RewardResult(score, {"f": score}) for score in (1.0, 0.0)]
    expected = [Group(5, [8, 9], samples, results, [0.0, -0.5], 0.25)]
    assert from_tensors(tensors) == expected
    assert from_tensors({f"ahead.{name}": tensor for name, tensor in tensors.items()}, "ahead.") == expected


def test_no_groups_are_no_tensors():
    assert to_tensors([]) == {}
    assert from_tensors({}) == []


def with_scores(*samples: tuple[float, float, float]) -> Group:
    """Return a group; each of `samples` is the first term, the weighted sum and the penalty of a sample."""
    results = [RewardResult(score, {"first": first, "second": 0.5}) for first, score, _ in samples]
    whole = [Sample.of(1, i, [1], [-1.0], "stop") for i in range(len(samples))]
    return Group(1, [1], whole, results, [penalty for *_, penalty in samples], baseline=None)


@pytest.mark.parametrize(
    ("samples", "acc", "seq_reward"),
    [
        ([(1, 1, 0), (1, 1, 0)], False, False),
        ([(0, 0, 0), (0, 0, 0), (1, 1, 0)], True, True),
        ([(0, 0.25, 0), (0, 0.5, 0)], False, True),
        ([(1, 1, 0), (1, 1, -0.5)], False, True),
        ([(0, 0.5, 0), (1, 0.5, 0)], True, False),
        ([(1, 1, 0)], False, False),
    ],
)
def test_has_signal_means_that_the_metric_differs_between_samples(samples, acc, seq_reward):
    of_samples = with_scores(*samples)
    assert of_samples.scores == [score + penalty for _, score, penalty in samples]
    assert (of_samples.has_signal("acc"), of_samples.has_signal("seq_reward")) == (acc, seq_reward)
