"""Defines the checkpoint format's number and migrates manifests of older formats.

A migration changes the manifest in memory, never in a published checkpoint. Other files of a checkpoint are not
migrated. Their readers check `Manifest.format` or the file itself, and read every form since `OLDEST`.

| Format | Release | What changed |
|---|---|---|
| 7 | 0.1.0 | |
| 8 | 0.2.0 | the manifest has `numerics`; carried samples are the arrays of `rlhf.rollout.sample_codec` |
| | | carried samples may include responses in flight, with the prefix `begun.` (`experience.partial_rollouts`) |
| | | an index has boxes beside ranges (`rlhf.storage.index_rows`) |
"""

from collections.abc import Callable
from typing import Any

FORMAT = 8
"""The format that this version writes."""
Payload = dict[str, Any]


def _from_7(payload: Payload) -> Payload:
    # 0.1.0 computed with the first numerics version.
    return payload | {"numerics": 1}


MIGRATIONS: dict[int, Callable[[Payload], Payload]] = {7: _from_7}
"""Format -> the function that converts a manifest's payload to the next format."""
OLDEST = min(MIGRATIONS)


def is_read(number: object) -> bool:
    """Return whether this version reads checkpoints of the format `number`."""
    return type(number) is int and OLDEST <= number <= FORMAT


def migrated(payload: Payload) -> Payload:
    """Return a manifest's payload with the present format's fields, unchecked. `format` stays unchanged."""
    # Promise 19.
    for number in range(payload["format"], FORMAT):
        payload = MIGRATIONS[number](payload)
    return payload
