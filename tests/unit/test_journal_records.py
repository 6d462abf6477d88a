"""Records of the rollout journal: they are exact, and torn or changed records differ from intact ones."""

import math

import pytest

from rlhf.experience.journal_records import (
    frame,
    from_payload,
    payloads,
    results_of,
    results_payload,
    samples_of,
    samples_payload,
    to_payload,
)
from rlhf.reward import RewardResult
from rlhf.rollout import Sample

PAYLOADS = [b"first", b"", b"the third\nhas lines", bytes(range(256)) * 5]
FILE = b"".join(map(frame, PAYLOADS))
SECOND = len(frame(PAYLOADS[0]))


def test_whole_records_come_back():
    assert payloads(FILE) == (PAYLOADS, len(FILE))
    assert payloads(b"") == ([], 0)


@pytest.mark.parametrize("end", range(SECOND, SECOND + len(frame(b"")) + 1))
def test_a_torn_record_is_dropped_and_earlier_records_are_kept(end):
    whole = end == SECOND + len(frame(b""))
    assert payloads(FILE[:end]) == ((PAYLOADS[:2], end) if whole else (PAYLOADS[:1], SECOND))


@pytest.mark.parametrize("position", range(8, len(frame(PAYLOADS[0]))))
def test_a_flipped_byte_costs_one_record(position):
    content = bytearray(FILE)
    content[position] ^= 0x10
    assert payloads(bytes(content)) == ([None, *PAYLOADS[1:]], len(FILE))


@pytest.mark.parametrize("position", range(8))
def test_no_wrong_record_is_read_after_a_flipped_length(position):
    content = bytearray(FILE)
    content[SECOND + position] ^= 0x10
    found, whole = payloads(bytes(content))
    assert found[0] == PAYLOADS[0]
    # A slightly wrong length leads into the middle of a record, where no hash matches.
    assert set(found[1:]) <= {None}
    assert SECOND <= whole <= len(FILE)


def test_samples_are_exact():
    samples = [
        Sample.of(7, 0, [3, 0, 151_935], [-0.1, -math.pi * 1e-9, float("-inf")], "length", 41),
        Sample.of(7, 1, [], [], "stop"),
        Sample.of(7, 2, [2], [-1e-45], "stop"),
        Sample.of(7, 0, [9, 9], [-0.0, -1 / 3], "stop"),
        Sample.of(7, 1, [4, 5, 6, 7, 8], [-0.1, 0.0, 0.0, -0.2, 0.0], "length", 0, ((1, 3), (4, 5))),
    ]
    document, tail = from_payload(samples_payload(0, 7, samples))
    assert samples_of(document, tail) == samples


def test_rewards_are_exact():
    results = [
        RewardResult(1 / 3, {"b": 0.1, "a": 2.0}, {"words": 1e-300}, 1, 2, {"read": "\ud800\n", "list": [None, 1]}),
        RewardResult(-0.0, {"b": float("nan"), "a": float("inf")}),
    ]
    document, tail = from_payload(results_payload(0, 7, "functions", results))
    assert tail == b""
    assert (document["uid"], document["scored_by"]) == (7, "functions")
    # Compared as text, because -0.0 equals 0.0, and NaN equals nothing.
    assert repr(results_of(document)) == repr(results)


def test_the_tail_of_a_record_may_contain_any_bytes():
    tail = b"\n\x00\n"
    assert from_payload(to_payload({"text": "a\nb"}, tail)) == ({"text": "a\nb"}, tail)
