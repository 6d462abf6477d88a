"""Formats of a checkpoint: the number in its manifest, and the migrations with which older formats are read.

A migration changes only what is in memory; no published checkpoint is written to. Stored forms beside the manifest have
no entry here: their reader takes `Manifest.format` (or what the file itself says) and reads each form since `OLDEST`.

| Format | Release | What changed |
|---|---|---|
| 7 | 0.1.0 | |
| 8 | 0.2.0 | the manifest has `numerics`; carried samples are the arrays of `rlhf.rollout.sample_codec` |
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
"""By format: the function that makes a manifest's payload one of the next format."""
OLDEST = min(MIGRATIONS)


def is_read(number: object) -> bool:
    """Whether this version reads checkpoints of the format `number`."""
    return type(number) is int and OLDEST <= number <= FORMAT


def migrated(payload: Payload) -> Payload:
    """A manifest's payload with the fields of the present format; `format` stays the stored one.

    Its fields may be of any type: nobody has checked them yet.
    """
    # Promise 19.
    for number in range(payload["format"], FORMAT):
        payload = MIGRATIONS[number](payload)
    return payload
