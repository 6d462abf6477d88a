"""Verifies a checkpoint's files: the ranks divide the blocks and compare each block with its hash."""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np

from rlhf.checkpoint.load.locations import FileLocations, locate_files, published
from rlhf.ranks.coordinator import Coordinator
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.reading import CheckedFiles

log = logging.getLogger(__name__)


class BlockNumbers:
    """Numbers all blocks of all files of a checkpoint, for bitmaps with one bit per block."""

    def __init__(self, located: FileLocations, files: CheckedFiles) -> None:
        counts = {name: len(files.blocks(name)) for name in located.manifest.files}
        ends = np.cumsum([0, *counts.values()]).tolist()
        self._first, self._count = dict(zip(counts, ends, strict=False)), ends[-1]

    def bits(self, blocks: Mapping[str, Collection[int]]) -> bytes:
        """Return a bitmap of all blocks, in which the bits of `blocks` are set."""
        flags = np.zeros(self._count, dtype=bool)
        for name, numbers in blocks.items():
            flags[self._first[name] + np.fromiter(numbers, dtype=np.int64)] = True
        return np.packbits(flags).tobytes()

    def not_in(self, bits: bytes, files: CheckedFiles, names: Sequence[str]) -> list[tuple[str, int]]:
        flags = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=self._count)
        return [(name, block) for name in names for block in files.blocks(name) if not flags[self._first[name] + block]]


def verify_share(
    files: CheckedFiles, names: Sequence[str], blocks: Sequence[tuple[str, int]], coordinator: Coordinator
) -> dict[str, str]:
    """Verify this rank's share of the files `names` (existence and size) and of `blocks` (content).

    Return one line per damaged file. Every rank of a storage domain passes the same `names` and `blocks`.
    """
    peers = [rank for rank, domain in enumerate(coordinator.domains) if domain == coordinator.domain]
    position, problems = peers.index(coordinator.rank), dict[str, str]()
    begin, end = (len(blocks) * n // len(peers) for n in (position, position + 1))
    share: dict[str, list[int]] = {name: [] for name in names[position :: len(peers)]}
    for name, block in blocks[begin:end]:
        share.setdefault(name, []).append(block)
    for name, numbers in share.items():
        try:
            files.check_entry(name)
            files.verify_blocks(name, numbers)
        except DamagedCheckpoint as problem:
            problems[name] = str(problem)
    return problems


def damage_of(located: FileLocations, names: Sequence[str], coordinator: Coordinator) -> list[str]:
    """Return one line per damaged file of a checkpoint. Each rank reads a share of `names`, the files to verify on its
    domain's disk. Collective."""
    return coordinator.combine(
        lambda: _damaged(located, names, coordinator),
        lambda found: list(dict.fromkeys(chain(*(damaged.values() for damaged in found)))),
    )


def _damaged(located: FileLocations, names: Sequence[str], coordinator: Coordinator) -> dict[str, str]:
    files = CheckedFiles(located.path, located.manifest.files)
    blocks = [(name, block) for name in names for block in files.blocks(name)]
    return verify_share(files, names, blocks, coordinator)


def locate_intact(located: FileLocations, coordinator: Coordinator) -> FileLocations:
    """Return `located` without damaged files, after reading all files of all domains. Collective.

    Logs a damaged file of which another domain has an intact copy. Raises DamagedCheckpoint on every rank if a file has
    no intact copy.
    """
    own = sorted(located.by_domain.get(coordinator.domain, ()))
    damaged: dict[int, dict[str, str]] = {}
    found = coordinator.everywhere(lambda: _damaged(located, own, coordinator))
    for domain, lines in zip(coordinator.domains, found, strict=True):
        damaged.setdefault(domain, {}).update(lines)
    intact = replace(
        located, by_domain={domain: names - damaged[domain].keys() for domain, names in located.by_domain.items()}
    )
    if lost := set(intact.missing):
        problems = [line for by_name in damaged.values() for name, line in by_name.items() if name in lost]
        raise DamagedCheckpoint("; ".join(dict.fromkeys(problems)) or intact.missing_text("memory"))
    for domain, by_name in damaged.items():
        if by_name and coordinator.is_leader:
            text = "%s is damaged on the node of rank %d: %s. The copy of another node is used."
            log.warning(text, located.path, domain, "; ".join(by_name.values()))
    return intact


def newest_usable(run_dir: Path, coordinator: Coordinator) -> Path | None:
    """Return the newest checkpoint that can be resumed, or None. The storage domains together must have all its files,
    undamaged. Collective; reads every byte of each checkpoint that it tries."""
    for path in published(run_dir, coordinator):
        try:
            located = locate_files(path, coordinator)
            own = sorted(located.by_domain.get(coordinator.domain, ()))
            problems = [located.missing_text()] if located.missing else damage_of(located, own, coordinator)
        except (DamagedCheckpoint, OSError) as error:
            problems = [str(error)]
        if not problems:
            return path
        if coordinator.is_leader:
            log.warning("%s is skipped: %s", path, "; ".join(problems))
    return None
