"""Encodes the records of a rollout journal as bytes, with hashes and without pickle.

A file is a sequence of records. A record is the length of its payload (8 bytes, little-endian), the xxh3-128 of length
and payload (16 bytes), and the payload. A payload is a line of JSON; in a record of samples the bytes of their arrays
(`rollout.sample_codec`) follow the line.
"""

import json
import struct
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import xxhash

from rlhf.reward import RewardResult
from rlhf.rollout import Sample
from rlhf.rollout.sample_codec import from_arrays, from_bytes, layout_of, to_arrays, to_bytes

_LENGTH, _HASH_BYTES = struct.Struct("<Q"), 16


def frame(payload: bytes) -> bytes:
    length = _LENGTH.pack(len(payload))
    return length + xxhash.xxh3_128_digest(length + payload) + payload


def payloads(content: bytes) -> tuple[list[bytes | None], int]:
    """Return the payloads of a file's records (None for a wrong hash) and the total bytes of complete records.

    Beyond that length a record is torn or its length is damaged, so the start of the next record is unknown.
    """
    found: list[bytes | None] = []
    position, prefix = 0, _LENGTH.size + _HASH_BYTES
    while position + prefix <= len(content):
        length = content[position : position + _LENGTH.size]
        digest = content[position + _LENGTH.size : position + prefix]
        end = position + prefix + _LENGTH.unpack(length)[0]
        if end > len(content):
            break
        payload = content[position + prefix : end]
        found.append(payload if xxhash.xxh3_128_digest(length + payload) == digest else None)
        position = end
    return found, position


def to_payload(document: dict[str, Any], tail: bytes = b"") -> bytes:
    """Return `document` as a line of JSON with lossless floats, followed by `tail`."""
    return json.dumps(document).encode() + b"\n" + tail


def from_payload(payload: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the document and the tail of a payload of `to_payload`."""
    line, _, tail = payload.partition(b"\n")
    return json.loads(line), tail


def samples_payload(call: int, uid: int, samples: Sequence[Sample]) -> bytes:
    """Return the payload for the samples of the prompt `uid` in generation number `call` of the step."""
    arrays = to_arrays(samples)
    return to_payload({"call": call, "uid": uid, "arrays": layout_of(arrays)}, b"".join(to_bytes(arrays)))


def turn_payload(key: Sequence[int | str], sample: Sample) -> bytes:
    """Return the payload for a turn of an episode. `key`: a `journal.EpisodeKey`."""
    arrays = to_arrays([sample])
    return to_payload({"turn": key, "arrays": layout_of(arrays)}, b"".join(to_bytes(arrays)))


def calls_payload(key: Sequence[int | str], operation: str, outcome: dict[str, Any]) -> bytes:
    """Return the payload for the outcome of an episode's calls. `outcome` has only JSON values."""
    return to_payload({"turn": key, "operation": operation, "outcome": outcome})


def samples_of(document: dict[str, Any], tail: bytes) -> list[Sample]:
    return from_arrays(from_bytes(tail, document["arrays"]))


def results_payload(call: int | None, uid: int, scored_by: str, results: Sequence[RewardResult]) -> bytes:
    """Return the payload for the rewards of the prompt `uid`.

    `call` is the number of the generation that added the samples; None for an earlier step. `scored_by` identifies the
    reward functions.
    """
    return to_payload(
        {"call": call, "uid": uid, "scored_by": scored_by, "results": [asdict(result) for result in results]}
    )


def results_of(document: dict[str, Any]) -> list[RewardResult]:
    return [RewardResult(**result) for result in document["results"]]
