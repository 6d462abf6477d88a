"""Sizes as texts. Imports no torch."""

import json
from typing import Any

from rlhf.checkpoint.commit.manifest import Manifest


def sizes_of(manifest: Manifest) -> str:
    """Bytes that a save wrote, and those that it linked."""
    linked = f" and {size_text(manifest.linked_bytes)} linked" if manifest.linked else ""
    return size_text(manifest.total_bytes) + linked


def size_text(count: int) -> str:
    """`count` bytes in MiB."""
    return f"{count / 2**20:.2f} MiB"


def as_json(document: Any) -> str:
    """`document` for a script: only printable ASCII, whatever a name or text in it says, and null for what is no number
    in JSON."""
    return json.dumps(json.loads(json.dumps(document), parse_constant=lambda constant: None), indent=1)
