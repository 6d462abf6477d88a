"""A checkpoint over several storage domains: who has which of its files, what is nowhere, and how ranks get at what others have."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from rlhf.checkpoint.commit.manifest import DOMAINS, Manifest, read_manifest
from rlhf.ranks.coordinator import Coordinator
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.files import remove, write_range
from rlhf.storage.hashing import BLOCK
from rlhf.storage.layout import MANIFEST, TEMPORARY, fresh_name, scan, step_of
from rlhf.storage.reading import CheckedFiles

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FileLocations:
    """One checkpoint: its place in this rank's storage domain (where nothing may be), the manifest, and who has which files.

    `held` has the names of the files by domain, in ascending order of the domains.
    """

    path: Path
    manifest: Manifest
    held: dict[int, frozenset[str]]

    @classmethod
    def whole(cls, path: Path, manifest: Manifest) -> "FileLocations":
        """For a checkpoint in a directory that all ranks see."""
        return cls(path, manifest, {0: frozenset(manifest.files)})

    @property
    def nowhere(self) -> list[str]:
        """The files that no domain has."""
        return [name for name in self.manifest.files if not any(name in names for names in self.held.values())]

    def holder(self, name: str) -> int:
        """The first domain that has a file, or the driver's when none has."""
        return next((domain for domain, names in self.held.items() if name in names), 0)

    def told(self) -> str:
        """What is nowhere, in one line."""
        missing = self.nowhere
        size = sum(self.manifest.files[name]["size"] for name in missing) / 2**20
        shown = ", ".join(missing[:6]) + (f" and {len(missing) - 6} more" if len(missing) > 6 else "")
        return f"{self.path.name} is not complete: on no node's disk are {shown} ({size:.1f} MiB)"


def published(run_dir: Path, coordinator: Coordinator) -> list[Path]:
    """The checkpoints that any storage domain has a part of, as paths in this rank's, newest first. Collective."""
    names = {name for names in coordinator.on_domain_leaders(lambda: [p.name for p in scan(run_dir)]) for name in names}
    return sorted((run_dir / name for name in names), key=lambda path: -(step_of(path) or 0))


@dataclass(frozen=True)
class _Look:
    """What a domain has of a checkpoint: the hash of its manifest, or what is wrong with that; a bit for each file that is there."""

    manifest_hash: str | None = None
    problem: str | None = None
    present: int = 0


def find_parts(path: Path, coordinator: Coordinator) -> FileLocations:
    """Who has what of the checkpoint at `path`. Collective; raises DamagedCheckpoint on every rank when no manifest of it is valid.

    Parts count together only when their manifests are the same: a folder of the same name that an earlier run left on a disk does not.
    """
    domains = coordinator.domain_leaders
    if len(domains) == 1:
        manifest = coordinator.on_leader(lambda: read_manifest(path))
        if not any(DOMAINS in entry for entry in manifest.files.values()):
            return FileLocations.whole(path, manifest)
        # Saved on several disks; opened on one of them, or where somebody has put the parts together.
        return FileLocations(path, manifest, {0: frozenset(coordinator.on_leader(lambda: _present(path, manifest)))})
    looks = dict(zip(domains, coordinator.on_domain_leaders(lambda: _look(path)), strict=True))
    found: dict[str, dict[int, int]] = {}
    for domain, look in looks.items():
        if look.manifest_hash is not None:
            found.setdefault(look.manifest_hash, {})[domain] = look.present
    if not found:
        raise DamagedCheckpoint(next((look.problem for look in looks.values() if look.problem), f"{path} is gone"))
    group = max(found.values(), key=_number_of_files)
    manifest = coordinator.on_rank(min(group), lambda: read_manifest(path))
    names = sorted(manifest.files)
    held = {domain: frozenset(n for i, n in enumerate(names) if group.get(domain, 0) >> i & 1) for domain in domains}
    return FileLocations(path, manifest, held)


def _look(path: Path) -> _Look:
    if not path.exists():
        return _Look()
    try:
        manifest = read_manifest(path)
    except DamagedCheckpoint as error:
        return _Look(problem=str(error))
    present = _present(path, manifest)
    bits = sum(1 << number for number, name in enumerate(sorted(manifest.files)) if name in present)
    return _Look(xxhash.xxh3_128((path / MANIFEST).read_bytes()).hexdigest(), None, bits)


def _present(path: Path, manifest: Manifest) -> set[str]:
    files, present = CheckedFiles(path, manifest.files), set()
    for name in manifest.files:
        try:
            files.check_entry(name)
            present.add(name)
        except DamagedCheckpoint:
            pass
    return present


def _number_of_files(group: Mapping[int, int]) -> int:
    union = 0
    for present in group.values():
        union |= present
    return union.bit_count()


class Fetched:
    """Blocks of a checkpoint's files that a storage domain lacks, got from the domains that have them, for the time of a load.

    They lie in a temporary directory, in files that are empty elsewhere; nothing is ever written into the checkpoint. A block of 4 MiB at a
    time is under way between two leaders, so memory does not grow with the files.
    """

    def __init__(self, parts: FileLocations, coordinator: Coordinator) -> None:
        self._parts, self._coordinator = parts, coordinator
        self._own = parts.held.get(coordinator.domain, frozenset())
        self._root: Path | None = None
        self._got: dict[int, set[tuple[str, int]]] = {domain: set() for domain in coordinator.domain_leaders}
        self.bytes = 0
        """Bytes that this rank, as a leader, has received."""

    def get(self, files: CheckedFiles, wanted: Mapping[str, Iterable[int]]) -> None:
        """Let `files` find the blocks `wanted`, by file, that lie in other domains only. Collective.

        Raises DamagedCheckpoint on every rank when a block is not as it was committed, OSError when a disk refuses it.
        """
        if len(self._got) == 1:
            return
        lacking = {name: sorted(blocks) for name, blocks in wanted.items() if name not in self._own}
        receivers: dict[tuple[str, int], set[int]] = {}
        for domain, wishes in zip(self._coordinator.domains, self._coordinator.gather(lacking), strict=True):
            for block in ((name, number) for name, numbers in wishes.items() for number in numbers):
                if block not in self._got[domain]:
                    self._got[domain].add(block)
                    receivers.setdefault(block, set()).add(domain)
        if receivers:
            if self._root is None:
                name = fresh_name(TEMPORARY, f"fetched-{self._parts.path.name}")
                self._root = self._parts.path.parent / self._coordinator.broadcast(name)
            self._coordinator.everywhere(partial(self._exchange, receivers))
        if self._root is not None:
            files.find_below(self._root, lacking)

    def _exchange(self, receivers: dict[tuple[str, int], set[int]]) -> None:
        """This rank's part. All go through the blocks in one order and never stop before the last, so that nobody waits in vain."""
        if not self._coordinator.leads_domain:
            return
        me, own = self._coordinator.rank, CheckedFiles(self._parts.path, self._parts.manifest.files)
        # The first byte says whether the sender could read what follows.
        memory = torch.empty(1 + BLOCK, dtype=torch.uint8)
        problem: Exception | None = None
        for (name, number), domains in sorted(receivers.items()):
            size = min(BLOCK, self._parts.manifest.files[name]["size"] - number * BLOCK)
            message, source = memory[: 1 + size], self._parts.holder(name)
            if me == source:
                try:
                    own.read(name, [(number * BLOCK, _view(message))])
                    message[0] = 1
                except (DamagedCheckpoint, OSError) as error:
                    problem = problem or error
                    message[0] = 0
                for domain in sorted(domains):
                    self._coordinator.send(message, domain)
            elif me in domains:
                self._coordinator.receive(message, source)
                if message[0] and problem is None:
                    try:
                        self._keep(name, number, _view(message))
                    except OSError as error:
                        problem = error
        if problem is not None:
            raise problem

    def _keep(self, name: str, number: int, content: memoryview) -> None:
        assert self._root is not None
        write_range(self._root / name, self._parts.manifest.files[name]["size"], number * BLOCK, content)
        self.bytes += len(content)

    def remove(self) -> None:
        """Give the room back, once no rank of the domain reads any more."""
        if self._coordinator.leads_domain and self._root is not None and self._root.exists():
            try:
                remove(self._root)
            except OSError as error:
                log.warning("%s could not be removed (%s); the next start does it.", self._root, error)


def _view(message: Tensor) -> memoryview:
    return message.numpy().data[1:]
