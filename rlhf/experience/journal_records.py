"""Records of a rollout journal's file as bytes: framed, hashed, and without any code in them.

A file is a sequence of records: the payload's length (8 bytes, little-endian), the xxh3-128 of length and payload (16
bytes), the payload. A payload is a line of JSON; that of samples is followed by their arrays (`rollout.sample_codec`).
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
    """`payload` as a record."""
    length = _LENGTH.pack(len(payload))
    return length + xxhash.xxh3_128_digest(length + payload) + payload


def payloads(content: bytes) -> tuple[list[bytes | None], int]:
    """The payload of each record of a file, None where the bytes are not as written, and the length of all in bytes.

    What lies beyond that length is torn, or the length of its first record is damaged: nobody knows where the next one
    begins.
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
    """A line of JSON, floats to the last bit, and `tail`."""
    return json.dumps(document).encode() + b"\n" + tail


def from_payload(payload: bytes) -> tuple[dict[str, Any], bytes]:
    """The document and the tail that `to_payload` was given."""
    line, _, tail = payload.partition(b"\n")
    return json.loads(line), tail


def samples_payload(uid: int, samples: Sequence[Sample]) -> bytes:
    """The samples of the prompt `uid`."""
    arrays = to_arrays(samples)
    return to_payload({"uid": uid, "arrays": layout_of(arrays)}, b"".join(to_bytes(arrays)))


def samples_of(document: dict[str, Any], tail: bytes) -> list[Sample]:
    """The samples of a `samples_payload`, taken apart by `from_payload`."""
    return from_arrays(from_bytes(tail, document["arrays"]))


def results_payload(uid: int, scored_by: str, results: Sequence[RewardResult]) -> bytes:
    """The rewards of the samples of the prompt `uid`; `scored_by` identifies the functions that gave them."""
    return to_payload({"uid": uid, "scored_by": scored_by, "results": [asdict(result) for result in results]})


def results_of(document: dict[str, Any]) -> list[RewardResult]:
    """The rewards of a `results_payload`."""
    return [RewardResult(**result) for result in document["results"]]
