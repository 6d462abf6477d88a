"""From a snapshot to a committed checkpoint: every rank writes its files, the leader proves and publishes the whole.

Where nodes have disks of their own, the leader of each storage domain does so on its disk, with one manifest for all, in two phases: nobody
gives a checkpoint its name before everybody has it whole and durable under a temporary one.

Needs only the snapshot, the directory and a coordinator, so it can run beside the training as well as in front of it.
"""

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from rlhf.checkpoint.commit import publication, retention
from rlhf.checkpoint.commit.deleter import Deleter
from rlhf.checkpoint.commit.manifest import DOMAINS, Manifest, describe, read_manifest
from rlhf.checkpoint.load.restoring import Throughput
from rlhf.checkpoint.save.disk_space import make_room
from rlhf.checkpoint.save.snapshot import Snapshot
from rlhf.config.checkpoint import CheckpointConfig
from rlhf.events import announce
from rlhf.ranks.coordinator import Coordinator, LostPeer
from rlhf.storage.disk_errors import SaveFailed, is_unfixable
from rlhf.storage.files import WrittenFile, make_new_dir, write_file, write_json
from rlhf.storage.layout import CONFIG, DRIVER_STATE, REFERENCE, SCHEDULE, rank_file, step_dir
from rlhf.storage.shards import INDEX, merge_indices, safetensors_chunks, write_shards

log = logging.getLogger(__name__)
# Room for manifest, indices and directory entries beside the counted bytes.
SLACK_BYTES = 1 << 20
Linked = dict[str, dict[str, dict[str, Any]]]
"""Folders whose files were linked, with the manifest's entries of these files."""


@dataclass(frozen=True)
class Identity:
    """What a manifest says of the run that wrote it."""

    backend: str
    config_hash: str
    fingerprints: dict[str, str]
    versions: dict[str, str]


@dataclass(frozen=True)
class SaveResult:
    """Where a checkpoint was published, the bytes written by its manifest, and the seconds from the snapshot to the commit.

    The training waited `blocked_seconds`, of them `wait_seconds` for the save before. `by_part` has the bytes that all ranks wrote and the
    seconds of the slowest one: of each role's files, of the reference's (`ref`), and of all else (`other`).
    """

    path: Path
    total_bytes: int
    seconds: float
    removed_steps: list[int]
    by_part: dict[str, Throughput] = field(default_factory=dict)
    blocked_seconds: float = 0.0
    wait_seconds: float = 0.0

    def metrics(self) -> dict[str, float]:
        """Seconds, bytes and bytes per second: of all under `perf/save_*`, of each part under `perf/save_*/PART`."""
        figures = {
            "perf/save_blocked_seconds": self.blocked_seconds,
            "perf/save_wait_seconds": self.wait_seconds,
        }
        named = {"": Throughput(self.total_bytes, self.seconds)}
        named |= {f"/{part}": transfer for part, transfer in self.by_part.items()}
        for name, transfer in named.items():
            figures[f"perf/save_seconds{name}"] = transfer.seconds
            figures[f"perf/save_bytes{name}"] = transfer.bytes
            figures[f"perf/save_bytes_per_second{name}"] = transfer.bytes / max(transfer.seconds, 1e-9)
        return figures


@dataclass(frozen=True)
class Draft:
    """A checkpoint that was begun: its temporary directory, and what it shares with a published one and so is not written."""

    root: Path
    linked: Linked


def begin_checkpoint(snapshot: Snapshot, run_dir: Path, coordinator: Coordinator) -> Draft:
    """What comes before the bytes. Collective; raises SaveFailed on every rank when a leader fails."""
    root: Path | None = None

    def begin() -> Linked:
        assert root is not None
        make_new_dir(root)
        return {
            folder: publication.link_folder(root, source, folder) or {} for folder, source in snapshot.unchanged.items()
        }

    try:
        root = run_dir / coordinator.on_leader(lambda: publication.temporary_name(snapshot.step))
        # The leaders try, and their outcome is everyone's: either no rank writes its part of such a component, or all do.
        tried = coordinator.on_domain_leaders(begin)
        linked = {folder: _over_domains([part[folder] for part in tried], coordinator) for folder in snapshot.unchanged}
        for folder, files in linked.items():
            if not files or not _all_of(snapshot.unchanged[folder], folder, files, coordinator):
                coordinator.on_domain_leaders(partial(publication.unlink_folder, root, folder))
                linked[folder] = {}
    except Exception as error:
        if root is not None:
            _clean_up(root, coordinator, error)
        raise _failed(snapshot, run_dir, error) from error
    return Draft(root, {folder: files for folder, files in linked.items() if files})


def _all_of(source: Path, folder: str, files: Collection[str], coordinator: Coordinator) -> bool:
    """Whether `files`, of all storage domains together, are all that the checkpoint `source` has in `folder`."""
    if len(coordinator.domain_leaders) == 1:
        return True
    return coordinator.on_leader(lambda: read_manifest(source).in_folder(folder).keys() == set(files))


def _over_domains(parts: list[dict[str, dict[str, Any]]], coordinator: Coordinator) -> dict[str, dict[str, Any]]:
    """The manifest's entries of files that storage domains have, from each one's; empty unless every domain has some."""
    if not all(parts):
        return {}
    merged = {name: entry for part in parts for name, entry in part.items()}
    holders = {
        name: [domain for domain, part in zip(coordinator.domain_leaders, parts, strict=True) if name in part]
        for name in merged
    }
    return {
        name: {key: value for key, value in entry.items() if key != DOMAINS}
        | ({DOMAINS: holders[name]} if len(holders[name]) < len(parts) else {})
        for name, entry in sorted(merged.items())
    }


def write_checkpoint(
    snapshot: Snapshot,
    run_dir: Path,
    identity: Identity,
    coordinator: Coordinator,
    settings: CheckpointConfig,
    deleter: Deleter,
    draft: Draft | None = None,
    make_way: Callable[[], None] = lambda: None,
) -> SaveResult:
    """Commit `snapshot` (begun as `draft`) as `run_dir/global_step_N` and apply retention. Collective.

    Raises SaveFailed on every rank when any rank fails; nothing is left behind and the previous checkpoint is untouched.
    """
    started = time.monotonic()
    draft = draft or begin_checkpoint(snapshot, run_dir, coordinator)
    root, linked = draft.root, draft.linked
    renamed: list[Path] = []
    try:
        snapshot = _with_shared_files(snapshot, coordinator)
        sizes = zip(coordinator.domains, coordinator.gather(snapshot.nbytes(linked)), strict=True)
        needed = sum(size for domain, size in sizes if domain == coordinator.domain) + SLACK_BYTES
        early = coordinator.on_domain_leaders(
            lambda: _make_room(run_dir, needed, snapshot, settings, deleter, make_way)
        )
        ranks = coordinator.everywhere(lambda: _write_part(root, snapshot, linked, coordinator.rank))
        manifest = coordinator.on_leader(
            lambda: _describe(run_dir, root, snapshot, identity, draft, ranks, coordinator)
        )
        coordinator.on_domain_leaders(lambda: _seal(root, manifest, ranks, coordinator))
        coordinator.on_domain_leaders(lambda: renamed.append(publication.give_name(run_dir, root, snapshot.step)))
    except Exception as error:
        _clean_up(root, coordinator, error, renamed)
        raise _failed(snapshot, run_dir, error) from error
    coordinator.on_domain_leaders(lambda: _point(run_dir, snapshot.step))
    removed = sorted({*chain(*early), *_retire(run_dir, settings, snapshot.step, deleter, coordinator)})
    seconds, path = time.monotonic() - started, step_dir(run_dir, snapshot.step)
    return SaveResult(path, manifest.total_bytes, seconds, removed, _transfers(manifest, ranks))


def _with_shared_files(snapshot: Snapshot, coordinator: Coordinator) -> Snapshot:
    """`snapshot`; on the leaders of other storage domains with the leader's small files that a resume reads on every rank."""
    if len(coordinator.domain_leaders) == 1:
        return snapshot
    names = {CONFIG, DRIVER_STATE, *(f"{role}/{SCHEDULE}" for role in snapshot.roles)}
    shared = coordinator.broadcast({name: content for name, content in snapshot.files.items() if name in names})
    return replace(snapshot, files=snapshot.files | shared) if coordinator.leads_domain else snapshot


def _point(run_dir: Path, step: int) -> None:
    try:
        publication.point_to(run_dir, step)
    except OSError as error:
        log.error("The pointer in %s could neither be written nor removed: %s", run_dir, error)
    announce("commit.published")


def _retire(
    run_dir: Path, settings: CheckpointConfig, step: int, deleter: Deleter, coordinator: Coordinator
) -> list[int]:
    """Apply retention; a step that one storage domain keeps stays in all of them, so that it stays whole."""
    spared: set[int] = set()
    if len(coordinator.domain_leaders) > 1:
        kept = coordinator.on_domain_leaders(lambda: retention.survivors(run_dir, settings, step))
        if None in kept:
            return []
        spared = set().union(*(steps or () for steps in kept))
    removed = coordinator.on_domain_leaders(lambda: retention.apply(run_dir, settings, step, deleter, spared))
    return list(chain(*removed))


def _failed(snapshot: Snapshot, run_dir: Path, error: Exception) -> SaveFailed:
    message = (
        f"The checkpoint of step {snapshot.step} in {run_dir} was not saved; earlier checkpoints are intact. {error}."
    )
    return SaveFailed(message, unfixable=is_unfixable(error))


def _clean_up(root: Path, coordinator: Coordinator, error: Exception, renamed: Collection[Path] = ()) -> None:
    """Remove what a failed save has left in this rank's storage domain."""
    several = len(coordinator.domain_leaders) > 1
    if not coordinator.leads_domain or (several and isinstance(error, LostPeer)):
        # A domain that was lost may have published its part. The next start knows, and completes this one or removes it.
        return
    for path in (root, *(() if isinstance(error, LostPeer) else renamed)):
        try:
            if path.exists():
                publication.discard(path)
        except OSError as problem:
            # Must not hide why the save failed, nor set this rank apart from the others.
            log.warning("%s could not be removed (%s); the next start does it.", path, problem)


def _make_room(
    run_dir: Path,
    needed: int,
    snapshot: Snapshot,
    settings: CheckpointConfig,
    deleter: Deleter,
    make_way: Callable[[], None],
) -> list[int]:
    may_go = partial(retention.victims, run_dir, settings, snapshot.step, snapshot.metrics)
    return make_room(run_dir, needed, may_go, deleter, settings.timeout_s / 2, make_way)


@dataclass
class _Written:
    """What one rank has written, its share of the indices by folder, and the seconds of each part."""

    files: list[WrittenFile] = field(default_factory=list)
    indices: dict[str, dict[str, Any]] = field(default_factory=dict)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))


def _write_part(root: Path, snapshot: Snapshot, linked: Linked, rank: int) -> _Written:
    written, since = _Written(), time.monotonic()

    def count(path: str) -> None:
        nonlocal since
        now = time.monotonic()
        written.seconds[_part_of(path, snapshot.roles)] += now - since
        since = now

    for folder, shards in snapshot.components.items():
        if folder not in linked:
            files, written.indices[folder] = write_shards(root, folder, rank_file(rank), shards)
            written.files += files
            count(folder)
    for path, tensors in snapshot.whole_tensors.items():
        written.files.append(write_file(root, path, safetensors_chunks(tensors)))
        count(path)
    for path, content in snapshot.files.items():
        written.files.append(write_file(root, path, [content]))
        count(path)
    return written


def _part_of(path: str, roles: list[str]) -> str:
    top = path.partition("/")[0]
    return top if top in (*roles, REFERENCE.partition("/")[0]) else "other"


def _transfers(manifest: Manifest, ranks: list[_Written]) -> dict[str, Throughput]:
    sizes: Counter[str] = Counter()
    linked = {name for folder in manifest.linked for name in manifest.in_folder(folder)}
    for name in manifest.files.keys() - linked:
        sizes[_part_of(name, manifest.roles)] += manifest.files[name]["size"]
    return {part: Throughput(size, max(rank.seconds[part] for rank in ranks)) for part, size in sorted(sizes.items())}


def _describe(
    run_dir: Path,
    root: Path,
    snapshot: Snapshot,
    identity: Identity,
    draft: Draft,
    ranks: list[_Written],
    coordinator: Coordinator,
) -> Manifest:
    """The manifest, once the leader has written the indices."""
    indices = _write_indices(root, ranks)
    parts: dict[int, list[WrittenFile]] = {domain: list(indices) for domain in coordinator.domain_leaders}
    for domain, written in zip(coordinator.domains, ranks, strict=True):
        parts[domain] += written.files
    linked = [entry for files in draft.linked.values() for entry in files.items()]
    return Manifest(
        step=snapshot.step,
        world_size=len(ranks),
        backend=identity.backend,
        contents=snapshot.contents,
        roles=snapshot.roles,
        config_hash=identity.config_hash,
        fingerprints=identity.fingerprints,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=identity.versions,
        files=_over_domains([describe(part) for part in parts.values()], coordinator) | dict(linked),
        linked={folder: _name_of(snapshot.unchanged[folder], run_dir) for folder in draft.linked},
        metrics=snapshot.metrics,
    )


def _write_indices(root: Path, ranks: list[_Written]) -> list[WrittenFile]:
    return [
        write_json(root, f"{folder}/{INDEX}", merge_indices([rank.indices[folder] for rank in ranks]))
        for folder in ranks[0].indices
    ]


def _seal(root: Path, manifest: Manifest, ranks: list[_Written], coordinator: Coordinator) -> None:
    """Make this storage domain's part whole and durable: whatever fails, fails before any domain has renamed its part."""
    if not coordinator.is_leader:
        _write_indices(root, ranks)
    for name, entry in manifest.files.items():
        if coordinator.domain in entry.get(DOMAINS, [coordinator.domain]) and not (root / name).is_file():
            raise FileNotFoundError(
                f"{name} was written and is not there for rank {coordinator.rank}: a file system that several nodes share must show what "
                "another node has written (see trainer.default_local_dir)."
            )
    publication.seal(root, manifest)


def _name_of(source: Path, run_dir: Path) -> str:
    return source.name if source.parent == run_dir else str(source)
