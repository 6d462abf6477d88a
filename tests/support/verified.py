"""Verifies a checkpoint as the verb `verify` does."""

from pathlib import Path

from rlhf.checkpoint.commit.manifest import Manifest
from rlhf.checkpoint.verbs.runs import LocalCheckpoint
from rlhf.checkpoint.verbs.verify import verify_found


def verify(root: Path) -> Manifest:
    """Return the manifest of the checkpoint in `root`; raise DamagedCheckpoint with a list of the damage."""
    return verify_found(LocalCheckpoint(root))
