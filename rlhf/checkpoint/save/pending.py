"""Begins a checkpoint: a temporary directory in every storage domain, with hard links to unchanged files."""

import logging
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rlhf.checkpoint.commit.formats import FORMAT
from rlhf.checkpoint.commit.manifest import DOMAINS, read_manifest
from rlhf.checkpoint.commit.publication import abort_save, temporary_name
from rlhf.checkpoint.save.snapshot import Snapshot
from rlhf.events import announce
from rlhf.ranks.coordinator import Coordinator
from rlhf.storage.disk_errors import DamagedCheckpoint, OtherFormat
from rlhf.storage.files import link, make_new_dir, remove_dir

log = logging.getLogger(__name__)
Entries = dict[str, dict[str, Any]]
"""The manifest's entries of files, by path."""


@dataclass(frozen=True)
class PendingCheckpoint:
    """A checkpoint in progress: its temporary directory, and the folders with hard links. On the leader, `linked` also
    has the manifest entries of each folder's files."""

    root: Path
    linked: dict[str, Entries]


def begin_checkpoint(snapshot: Snapshot, run_dir: Path, coordinator: Coordinator) -> PendingCheckpoint:
    """Create a checkpoint's directory and hard links. Collective. Raise SaveFailed on every rank if a leader fails."""
    root: Path | None = None

    def begin() -> dict[str, Entries]:
        assert root is not None
        make_new_dir(root)
        return {folder: _link_folder(root, source, folder) or {} for folder, source in snapshot.unchanged.items()}

    try:
        root = run_dir / coordinator.on_leader(lambda: temporary_name(snapshot.step))
        # The leaders' outcome applies to all ranks: either no rank writes its shards of a component, or all do.
        tried = coordinator.collect(lambda: begin() if coordinator.leads_domain else {}) or []
        entries: dict[str, Entries] = {}

        def agree() -> list[str]:
            for folder, source in snapshot.unchanged.items():
                merged = over_domains([tried[leader][folder] for leader in coordinator.domain_leaders], coordinator)
                if merged and _is_complete(source, folder, merged, coordinator):
                    entries[folder] = merged
            return list(entries)

        linked = coordinator.on_leader(agree)
        for folder in snapshot.unchanged:
            if folder not in linked:
                coordinator.on_domain_leaders(partial(_unlink_folder, root, folder))
    except Exception as error:
        raise abort_save(run_dir, snapshot.step, root, coordinator, error) from error
    return PendingCheckpoint(root, {folder: entries.get(folder, {}) for folder in linked})


def over_domains(by_domain: list[Entries], coordinator: Coordinator) -> Entries:
    """Merge the domains' manifest entries. Return no entries if a domain has none."""
    if not all(by_domain):
        return {}
    merged = {name: entry for entries in by_domain for name, entry in entries.items()}
    holders = {
        name: [d for d, entries in zip(coordinator.domain_leaders, by_domain, strict=True) if name in entries]
        for name in merged
    }
    return {
        name: {key: value for key, value in entry.items() if key != DOMAINS}
        | ({DOMAINS: holders[name]} if len(holders[name]) < len(by_domain) else {})
        for name, entry in sorted(merged.items())
    }


def _is_complete(source: Path, folder: str, names: Collection[str], coordinator: Coordinator) -> bool:
    """Return whether the domains' files `names` are all files of `source` in `folder`. Call this on the leader only."""
    return len(coordinator.domain_leaders) == 1 or read_manifest(source).in_folder(folder).keys() == set(names)


def _link_folder(root: Path, source: Path, folder: str) -> Entries | None:
    """Hard-link the files of `source`'s `folder`, as far as this domain has them, and return their manifest entries.

    If linking fails, logs the reason, removes the links and returns None. Linking fails if `source` is missing, has
    another checkpoint format or is on another file system, or if the file system has no hard links. Published
    checkpoints can share a file because no process writes to it (promise 3). The file system keeps the file while any
    checkpoint links it, so retention ignores links.
    """
    try:
        manifest = read_manifest(source)
        if manifest.format != FORMAT:
            raise OtherFormat(f"{source.name} has format {manifest.format}")
        entries = manifest.in_folder(folder)
        make_new_dir(root / folder)
        here = {name: entry for name, entry in entries.items() if DOMAINS not in entry or (source / name).exists()}
        for name in here:
            announce("commit.link")
            link(source / name, root / name)
        return here
    except (OSError, DamagedCheckpoint) as error:
        log.warning("%s cannot be hard-linked from %s; the save writes it again: %s", folder, source, error)
        _unlink_folder(root, folder)
        return None


def _unlink_folder(root: Path, folder: str) -> None:
    if (root / folder).exists():
        remove_dir(root / folder)
