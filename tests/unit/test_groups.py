"""Groups on their way through a checkpoint are the same ones, and only those without a difference are without
signal."""

import math
from typing import Any

import pytest

from rlhf.experience.groups import Group, from_tensors, to_tensors
from rlhf.reward import RewardResult
from rlhf.rollout import Sample
from rlhf.storage.shards import DTYPE_NAMES

AWKWARD = [0.1 + 0.2, -0.0, 1e-320, -math.pi * 1e200, math.nextafter(1, 2), 2.0, 1 / 3]


def group(uid: int, lengths: list[int], **more: Any) -> Group:
    """A group with floats that any rounding would change."""
    samples, results = [], []
    for number, length in enumerate(lengths):
        log_probs = [AWKWARD[(uid + number + i) % len(AWKWARD)] for i in range(length)]
        token_ids = [100 * uid + 10 * number + i for i in range(length)]
        spans = ((0, 1), (2, 3)) if length > 2 else ()
        reason = "stop" if number % 2 else "length"
        samples.append(Sample(uid, number, token_ids, log_probs, reason, number + 3, spans))
        terms = {"zweite": AWKWARD[number], "Prüfung": 1.0}
        results.append(
            RewardResult(AWKWARD[-number], terms, {"länge": length / 3}, number % 2, number % 3, {"text": ["ä", None]})
        )
    values: dict[str, Any] = {
        "penalties": [-0.7 * i for i in range(len(lengths))],
        "baseline": None,
    }
    return Group(uid, [uid] * (1 + uid % 4), samples, results, **(values | more))


def test_the_round_trip_is_exact():
    groups = [group(7, [3, 1, 0, 4]), group(2**40, [2, 2], baseline=0.1 + 0.2), group(9, [0])]
    tensors = to_tensors(groups)
    restored = from_tensors(tensors)
    assert restored == groups
    # Equality takes 0.0 for -0.0 and ignores the order of names, which says what the first reward is.
    assert repr(restored) == repr(groups)
    assert all(tensor.dtype in DTYPE_NAMES and tensor.dim() == 1 for tensor in tensors.values())


def test_no_groups_are_no_tensors():
    assert to_tensors([]) == {}
    assert from_tensors({}) == []


def with_scores(*samples: tuple[float, float, float]) -> Group:
    """Of each sample the first term, the weighted sum and the penalty."""
    results = [RewardResult(score, {"first": first, "second": 0.5}) for first, score, _ in samples]
    whole = [Sample(1, i, [1], [-1.0], "stop") for i in range(len(samples))]
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
def test_signal_is_a_difference_in_the_metric(samples, acc, seq_reward):
    of_samples = with_scores(*samples)
    assert of_samples.scores == [score + penalty for _, score, penalty in samples]
    assert (of_samples.has_signal("acc"), of_samples.has_signal("seq_reward")) == (acc, seq_reward)
