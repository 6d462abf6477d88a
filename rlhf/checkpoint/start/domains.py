"""Finds storage domains at the start, without configuration: groups of ranks that see the same run directory.

Nodes may share a file system, have their own disks, or mix both (for example, a driver on a machine without GPUs). The
leader of a domain creates, renames and deletes files on the domain's disk.
"""

import logging
import time
import uuid
from contextlib import suppress
from pathlib import Path

from rlhf.errors import UserError
from rlhf.ranks.coordinator import Coordinator
from rlhf.storage.files import create_empty, remove_file
from rlhf.storage.layout import TEMPORARY

log = logging.getLogger(__name__)
LOOK_AGAIN_S = 0.25
# A network file system may show another node's file late. If not all ranks see each other, they repeat the check LOOKS
# times. While rank a sees rank b but b does not see a, they repeat it up to LOOKS_IN_DISAGREEMENT times.
LOOKS, LOOKS_IN_DISAGREEMENT = 2, 120


def find_domains(run_dir: Path, coordinator: Coordinator) -> list[int]:
    """Return each rank's storage domain, the lowest rank that sees the same run directory. Collective.

    Each rank creates the directory, writes a token file into it, checks which tokens it sees, and removes its token.
    Raises UserError when the ranks contradict each other.
    """
    if coordinator.world_size == 1:
        return [0]
    token = run_dir / f"{TEMPORARY}token-{coordinator.rank}-{uuid.uuid4().hex}"
    try:
        tokens = coordinator.everywhere(lambda: create_empty(token).name)
        seen = _poll_until_agreed(run_dir, tokens, coordinator)
    finally:
        with suppress(OSError):  # a failed removal must not hide a failed creation
            remove_file(token)
    coordinator.all_gather(None)  # wait until all ranks have removed their tokens: a cleanup follows
    domains = [min(view) for view in seen]
    if coordinator.is_leader and len(found := sorted(set(domains))) > 1:
        members = [[str(rank) for rank, own in enumerate(domains) if own == domain] for domain in found]
        log.info(
            "The ranks have %d storage domains: %s. Each domain stores its own ranks' files of every checkpoint.",
            len(members),
            "; ".join(f"ranks {', '.join(ranks)}" for ranks in members),
        )
    return domains


def _poll_until_agreed(run_dir: Path, tokens: list[str], coordinator: Coordinator) -> list[frozenset[int]]:
    """Return, for each rank, the ranks whose `tokens` it sees, once all ranks agree."""
    seen: list[frozenset[int]] = []
    for look in range(LOOKS_IN_DISAGREEMENT):
        # Look up each new name. A listing of the directory may come from a cache.
        seen = coordinator.everywhere(lambda: frozenset(r for r, n in enumerate(tokens) if (run_dir / n).exists()))
        if _agree(seen) and (look >= LOOKS or len(seen[0]) == coordinator.world_size):
            return seen
        time.sleep(LOOK_AGAIN_S)
    views = "; ".join(f"rank {rank} sees {sorted(view)}" for rank, view in enumerate(seen))
    raise UserError(
        f"The ranks disagree about who shares the run directory {run_dir} ({views}). Use a file system that shows new "
        "files on all nodes, or set trainer.default_local_dir to a folder on such a file system."
    )


def _agree(seen: list[frozenset[int]]) -> bool:
    """Return whether each rank sees itself and, if a rank sees another rank, both see the same ranks."""
    sees_itself = all(rank in view for rank, view in enumerate(seen))
    return sees_itself and all(seen[other] == view for view in seen for other in view)
