"""Proof of a checkpoint's files, spread over the ranks: each block is compared with its hash by one of them."""

import logging
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from rlhf.checkpoint.load.locations import FileLocations, locate_files, published
from rlhf.ranks.coordinator import Coordinator
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.reading import CheckedFiles

log = logging.getLogger(__name__)


class BlockNumbers:
    """Numbers of all blocks of all files of a checkpoint, so that a bit can stand for each."""

    def __init__(self, located: FileLocations, files: CheckedFiles) -> None:
        counts = {name: len(files.blocks(name)) for name in located.manifest.files}
        ends = np.cumsum([0, *counts.values()]).tolist()
        self._first, self._count = dict(zip(counts, ends, strict=False)), ends[-1]

    def bits(self, blocks: Mapping[str, Collection[int]]) -> bytes:
        """A bit for each block, set for `blocks`."""
        flags = np.zeros(self._count, dtype=bool)
        for name, numbers in blocks.items():
            flags[self._first[name] + np.fromiter(numbers, dtype=np.int64)] = True
        return np.packbits(flags).tobytes()

    def not_in(self, bits: bytes, files: CheckedFiles, names: Sequence[str]) -> list[tuple[str, int]]:
        """The blocks of the files `names` whose bits are not set."""
        flags = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=self._count)
        return [(name, block) for name in names for block in files.blocks(name) if not flags[self._first[name] + block]]


def verify_share(
    files: CheckedFiles, names: Sequence[str], blocks: Sequence[tuple[str, int]], coordinator: Coordinator
) -> list[str]:
    """Prove this rank's share of `names`, that they are there, and of `blocks`; one line per damaged file.

    Every rank of a storage domain has the same `names` and `blocks`.
    """
    peers = [rank for rank, domain in enumerate(coordinator.domains) if domain == coordinator.domain]
    place, problems = peers.index(coordinator.rank), []
    begin, end = (len(blocks) * n // len(peers) for n in (place, place + 1))
    share: dict[str, list[int]] = {name: [] for name in names[place :: len(peers)]}
    for name, block in blocks[begin:end]:
        share.setdefault(name, []).append(block)
    for name, numbers in share.items():
        try:
            files.check_entry(name)
            files.prove(name, numbers)
        except DamagedCheckpoint as problem:
            problems.append(str(problem))
    return problems


def damage_of(located: FileLocations, names: Sequence[str], coordinator: Coordinator) -> list[str]:
    """Damage of a checkpoint, one line per file: every rank reads a share of `names`, the files of its storage domain.
    Collective."""
    files = CheckedFiles(located.path, located.manifest.files)
    blocks = [(name, block) for name in names for block in files.blocks(name)]
    return coordinator.combine(
        lambda: verify_share(files, names, blocks, coordinator), lambda found: list(dict.fromkeys(chain(*found)))
    )


def newest_usable(run_dir: Path, coordinator: Coordinator) -> Path | None:
    """The checkpoint that a resume would take now: the newest one of which all storage domains together have every
    file, and each of them its part as it was committed. Collective; reads every byte up to there."""
    for path in published(run_dir, coordinator):
        try:
            located = locate_files(path, coordinator)
            problems = [located.missing()] if located.nowhere else _of_every_disk(located, coordinator)
        except (DamagedCheckpoint, OSError) as error:
            problems = [str(error)]
        if not problems:
            return path
        if coordinator.is_leader:
            log.warning("%s is passed over: %s", path, "; ".join(problems))
    return None


def _of_every_disk(located: FileLocations, coordinator: Coordinator) -> list[str]:
    return damage_of(located, sorted(located.held.get(coordinator.domain, ())), coordinator)
