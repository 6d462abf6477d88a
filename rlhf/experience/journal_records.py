"""Records of a rollout journal's file as bytes: framed, hashed, and without any code in them.

A file is a sequence of records: the payload's length (8 bytes, little-endian), the xxh3-128 of length and payload (16
bytes), the payload. A payload is a line of JSON; that of samples is followed by int32 token ids and float64 log-probs.
"""

import json
import struct
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import xxhash

from rlhf.reward import RewardResult
from rlhf.rollout import Sample, as_spans

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
    document = {
        "uid": uid,
        "samples": [[s.sample, len(s.token_ids), s.finish_reason, s.version, s.observations] for s in samples],
    }
    token_ids = np.array([token for s in samples for token in s.token_ids], "<i4")
    log_probs = np.array([log_prob for s in samples for log_prob in s.log_probs], "<f8")
    return to_payload(document, token_ids.tobytes() + log_probs.tobytes())


def samples_of(document: dict[str, Any], tail: bytes) -> list[Sample]:
    """The samples of a `samples_payload`, taken apart by `from_payload`."""
    total = sum(length for _, length, *_ in document["samples"])
    token_ids = np.frombuffer(tail, "<i4", total).tolist()
    log_probs = np.frombuffer(tail, "<f8", total, offset=4 * total).tolist()
    samples, start = [], 0
    for number, length, reason, version, observations in document["samples"]:
        part = slice(start, start + length)
        written = Sample(
            document["uid"], number, token_ids[part], log_probs[part], reason, version, as_spans(observations)
        )
        samples.append(written)
        start += length
    return samples


def results_payload(uid: int, scored_by: str, results: Sequence[RewardResult]) -> bytes:
    """The rewards of the samples of the prompt `uid`; `scored_by` identifies the functions that gave them."""
    return to_payload({"uid": uid, "scored_by": scored_by, "results": [asdict(result) for result in results]})


def results_of(document: dict[str, Any]) -> list[RewardResult]:
    """The rewards of a `results_payload`."""
    return [RewardResult(**result) for result in document["results"]]
