"""Finds the storage domains that have each file of a checkpoint, and the missing files. Imports no torch."""

from dataclasses import dataclass
from functools import partial, reduce
from operator import or_
from pathlib import Path

import xxhash

from rlhf.checkpoint.commit.manifest import DOMAINS, Manifest, manifest_bytes, parse_manifest, read_manifest
from rlhf.checkpoint.commit.pointer import read_pointer
from rlhf.errors import UserError
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.run_events import read_events
from rlhf.storage.disk_errors import DamagedCheckpoint, OtherFormat
from rlhf.storage.layout import EVENTS, MANIFEST, POINTER, scan, set_aside_dirs, step_of
from rlhf.storage.reading import CheckedFiles


@dataclass(frozen=True)
class FileLocations:
    """Locates one checkpoint's files. `path` is in this rank's storage domain and need not exist.

    `by_domain` maps each domain, in ascending order, to the names of its files.
    """

    path: Path
    manifest: Manifest
    by_domain: dict[int, frozenset[str]]

    @classmethod
    def whole(cls, path: Path, manifest: Manifest) -> "FileLocations":
        """Return the locations for a checkpoint in a directory that all ranks see."""
        return cls(path, manifest, {0: frozenset(manifest.files)})

    @property
    def missing(self) -> list[str]:
        """The files that no domain has."""
        return [name for name in self.manifest.files if not any(name in names for names in self.by_domain.values())]

    @property
    def may_be_elsewhere(self) -> bool:
        """Whether a missing file may be on a disk that is not mounted; otherwise the missing file is damage."""
        return len(self.by_domain) > 1 or any(DOMAINS in entry for entry in self.manifest.files.values())

    def source_domain(self, name: str) -> int:
        """Return the first domain that has a file, or 0 when none has."""
        return next((domain for domain, names in self.by_domain.items() if name in names), 0)

    def missing_text(self, place: str = "disk") -> str:
        names = self.missing
        size = sum(self.manifest.files[name]["size"] for name in names) / 2**20
        shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
        return f"{self.path.name} is not complete: no node's {place} has {shown} ({size:.1f} MiB)"


def published(run_dir: Path, coordinator: Coordinator) -> list[Path]:
    """Return the paths of the checkpoints of all storage domains, newest first. Collective.

    The paths are in this rank's `run_dir`, and need not exist.
    """
    names = {name for names in coordinator.on_domain_leaders(lambda: [p.name for p in scan(run_dir)]) for name in names}
    return sorted((run_dir / name for name in names), key=lambda path: -(step_of(path) or 0))


def reject_lost(run_dir: Path, coordinator: Coordinator) -> None:
    """Raise UserError if a pointer names a step, or events.jsonl records a save, but no storage domain has a
    checkpoint. Collective.

    The trainer removes the pointer before the last checkpoint loses its name, so a pointer alone means that another
    program or a user has removed the checkpoints. A recorded save without a checkpoint means the same, unless the
    trainer has set checkpoints aside: then a fork begins again from its source.
    """
    if published(run_dir, coordinator):
        return
    reasons = ("damaged", "incomplete")
    aside = coordinator.on_domain_leaders(lambda: any(set_aside_dirs(run_dir, reason) for reason in reasons))
    for name, read in ((POINTER, read_pointer), (EVENTS, _last_saved)):
        steps = [step for step in coordinator.on_domain_leaders(partial(read, run_dir)) if step is not None]
        if steps and not (name == EVENTS and any(aside)):
            raise UserError(
                f"{run_dir / name} names step {max(steps)}, but {run_dir} has no checkpoint, and the run will not "
                "start again at step 0 by itself. Restore the checkpoints (global_step_N) there, or start anew with "
                "trainer.overwrite=true or another trainer.experiment_name."
            )


def _last_saved(run_dir: Path) -> int | None:
    """Return the step of the last save in events.jsonl, or None before the first save."""
    return next((event.step for event in reversed(read_events(run_dir)) if event.kind == "saved"), None)


def locate_files(path: Path, coordinator: Coordinator) -> FileLocations:
    """Locate each file of the checkpoint at `path` in the storage domains. Collective. Raises DamagedCheckpoint on
    every rank if no domain has a valid manifest."""
    if len(coordinator.domain_leaders) > 1:
        return _locate_over_domains(path, coordinator)
    manifest = coordinator.on_leader(lambda: read_manifest(path))
    if not any(DOMAINS in entry for entry in manifest.files.values()):
        return FileLocations.whole(path, manifest)
    # The checkpoint was saved on several disks. This directory is on one of the disks, or is a copy with all files.
    return FileLocations(path, manifest, {0: frozenset(coordinator.on_leader(lambda: _present(path, manifest)))})


def _locate_over_domains(path: Path, coordinator: Coordinator) -> FileLocations:
    """Locate files across domains. If manifests differ, use the manifest whose domains together have the most files:
    an earlier run may have left a checkpoint of the same step on a disk."""
    domains = coordinator.domain_leaders
    parts = dict(zip(domains, coordinator.on_domain_leaders(lambda: _read_domain_files(path)), strict=True))
    found: dict[str, dict[int, int]] = {}
    for domain, part in parts.items():
        if isinstance(part, tuple):
            found.setdefault(part[0], {})[domain] = part[1]
    if not found:
        raise DamagedCheckpoint(next((str(part) for part in parts.values() if part), f"{path} is gone"))
    group = max(found.values(), key=lambda by_domain: reduce(or_, by_domain.values()).bit_count())
    manifest = coordinator.on_rank(min(group), lambda: read_manifest(path))
    names = sorted(manifest.files)
    here = {domain: frozenset(n for i, n in enumerate(names) if group.get(domain, 0) >> i & 1) for domain in domains}
    return FileLocations(path, manifest, here)


def _read_domain_files(path: Path) -> tuple[str, int] | str | None:
    """Return the manifest's hash and a bitmap of this domain's files, or the manifest's damage; None if
    `path` does not exist. Raises OtherFormat."""
    if not path.exists():
        return None
    try:
        raw = manifest_bytes(path)
        manifest = parse_manifest(raw, path / MANIFEST)
    except OtherFormat:
        raise
    except DamagedCheckpoint as error:
        return str(error)
    present = _present(path, manifest)
    bits = sum(1 << number for number, name in enumerate(sorted(manifest.files)) if name in present)
    return xxhash.xxh3_128_hexdigest(raw), bits


def _present(path: Path, manifest: Manifest) -> set[str]:
    files, present = CheckedFiles(path, manifest.files), set()
    for name in manifest.files:
        try:
            files.check_entry(name)
            present.add(name)
        except DamagedCheckpoint:
            pass
    return present
