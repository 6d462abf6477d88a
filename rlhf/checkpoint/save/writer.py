"""Writes a snapshot as a checkpoint: every rank writes its files, and the leaders publish the checkpoint.

If nodes have their own disks, the leader of each storage domain publishes its part, with the same manifest. The writer
needs only the snapshot, the directory and a coordinator, so it can run in a background thread.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from pathlib import Path

from rlhf.checkpoint.commit import retention
from rlhf.checkpoint.commit.deleter import Deleter
from rlhf.checkpoint.commit.identity import Identity
from rlhf.checkpoint.commit.manifest import DOMAINS, Manifest, describe
from rlhf.checkpoint.commit.publication import abort_save, publish
from rlhf.checkpoint.save.disk_space import make_room
from rlhf.checkpoint.save.node_copies import copied_to, copy_to_nodes, with_copies
from rlhf.checkpoint.save.pending import Entries, PendingCheckpoint, begin_checkpoint, over_domains
from rlhf.checkpoint.save.snapshot import Snapshot
from rlhf.checkpoint.state.throughput import Throughput, throughput_metrics
from rlhf.config.schema.checkpoint import CheckpointConfig
from rlhf.models.hf.hf_writer import Exported, write_exports
from rlhf.ranks.coordinator import Coordinator
from rlhf.storage.files import WrittenFile, hash_in_memory, write_file
from rlhf.storage.index_rows import ROW_BYTES
from rlhf.storage.layout import CONFIG, DRIVER_STATE, INDEX, REFERENCE, SCHEDULE, rank_file
from rlhf.storage.shard_index import FileShards, merge_shares
from rlhf.storage.shards import safetensors_chunks, tensor_table, write_shards

# Space beside the counted bytes, for the manifest, names and directory entries: a fixed part, and a part per rank.
SLACK_BYTES, RANK_BYTES = 1 << 20, 2 << 10


@dataclass(frozen=True)
class SaveResult:
    """Describes a published checkpoint: its path, the bytes written, and the seconds from snapshot to commit.

    The training waited `blocked_seconds`, including `wait_seconds` for the previous save. `by_part` has the bytes that
    all ranks wrote and the seconds of the slowest rank: for each role's files, the reference's (`ref`), and all other
    files (`other`).
    """

    path: Path
    total_bytes: int
    seconds: float
    by_part: dict[str, Throughput] = field(default_factory=dict)
    blocked_seconds: float = 0.0
    wait_seconds: float = 0.0

    def metrics(self) -> dict[str, float]:
        """Return seconds, bytes and bytes per second: totals as `perf/save_*`, each part's as `perf/save_*/PART`.
        `timing_s/save_checkpoint` is the training's wait."""
        waited = {"timing_s/save_checkpoint": self.blocked_seconds, "perf/save_wait_seconds": self.wait_seconds}
        return waited | throughput_metrics("save", Throughput(self.total_bytes, self.seconds), self.by_part)


def write_checkpoint(
    snapshot: Snapshot,
    run_dir: Path,
    identity: Identity,
    coordinator: Coordinator,
    settings: CheckpointConfig,
    deleter: Deleter,
    pending: PendingCheckpoint | None = None,
    cancel_copy: Callable[[], None] = lambda: None,
    copies: int = 0,
) -> SaveResult:
    """Commit `snapshot` (begun as `pending`) as `run_dir/global_step_N` and apply retention. Collective.

    Also store each storage domain's files in `copies` other domains.

    Raises SaveFailed on every rank when any rank fails. Then the leaders remove the incomplete checkpoint. Earlier
    checkpoints are unchanged, but `make_room` may have removed those that retention would remove. Raises LostPeer if a
    rank is lost after `publish` has renamed the directories.
    """
    started = time.monotonic()
    pending = pending or begin_checkpoint(snapshot, run_dir, coordinator)
    root = pending.root
    try:
        snapshot = _with_shared_files(snapshot, coordinator)
        needed = _needed(snapshot, pending.linked, copies, coordinator)
        find_victims = partial(retention.victims, run_dir, settings, snapshot.step, coordinator, snapshot.metrics)
        make_room(run_dir, needed, find_victims, deleter, settings.timeout_s / 2, coordinator, cancel_copy)
        ranks = coordinator.collect(lambda: _write_files(root, snapshot, pending.linked, coordinator.rank))
        exported = write_exports(root, snapshot.exports, coordinator)
        if ranks is not None and exported is not None:
            _add_exported(ranks, exported, snapshot.roles)
        commit = coordinator.send_to_domain_leaders(
            lambda: complete(run_dir, snapshot, identity, pending, ranks or [], coordinator)
        )
        coordinator.on_domain_leaders(lambda: _write_indices(root, commit))
        if copies:
            commit = _copied(root, commit, copies, coordinator)
        total_bytes, by_part = coordinator.broadcast(None if commit is None else commit.throughput)
    except Exception as error:
        # Promise 8.
        raise abort_save(run_dir, snapshot.step, root, coordinator, error) from error
    path = publish(run_dir, root, snapshot.step, None if commit is None else commit.manifest, coordinator)
    retention.retire(run_dir, settings, snapshot.step, deleter, coordinator)
    return SaveResult(path, total_bytes, time.monotonic() - started, by_part)


def _needed(snapshot: Snapshot, linked: Collection[str], copies: int, coordinator: Coordinator) -> int:
    """Return the bytes that the save needs on the disk of this rank's domain; 0 on ranks that do not lead a domain.
    Collective."""
    nodes = coordinator.domain_leaders
    exported = sum(export.plan.weights_bytes for export in snapshot.exports.values()) if coordinator.is_leader else 0
    sizes = coordinator.collect(lambda: (snapshot.nbytes(linked) + exported, snapshot.index_rows(linked))) or []

    def by_domain() -> Counter[int]:
        everywhere = sum(rows for _, rows in sizes) * ROW_BYTES + len(sizes) * RANK_BYTES + SLACK_BYTES
        needed = Counter(dict.fromkeys(nodes, everywhere))
        for domain, (size, _) in zip(coordinator.domains, sizes, strict=True):
            for holder in (domain, *copied_to(domain, nodes, copies)):
                needed[holder] += size
        return needed

    needed = coordinator.send_to_domain_leaders(by_domain)
    return 0 if needed is None else needed[coordinator.domain]


def _with_shared_files(snapshot: Snapshot, coordinator: Coordinator) -> Snapshot:
    """Return `snapshot`; domain leaders add rank 0's small files, because a resume reads these files on every rank."""
    if len(coordinator.domain_leaders) == 1:
        return snapshot
    names = {CONFIG, DRIVER_STATE, *(f"{role}/{SCHEDULE}" for role in snapshot.roles)}
    shared = coordinator.broadcast({name: content for name, content in snapshot.files.items() if name in names})
    return replace(snapshot, files=snapshot.files | shared) if coordinator.leads_domain else snapshot


@dataclass
class RankFiles:
    """A rank's report to the leader: its files, its shards for each folder's index, and the seconds of each part."""

    files: list[WrittenFile] = field(default_factory=list)
    indices: dict[str, FileShards] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def add_seconds(self, part: str, seconds: float) -> None:
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds


@dataclass(frozen=True)
class Commit:
    """The last files of a save: the manifest and the indices by path. `throughput` has the bytes written in
    total, and each part's bytes and seconds."""

    manifest: Manifest
    indices: dict[str, bytes]
    throughput: tuple[int, dict[str, Throughput]]


def _write_files(root: Path, snapshot: Snapshot, linked: Collection[str], rank: int) -> RankFiles:
    written, since = RankFiles(), time.monotonic()

    def count(path: str) -> None:
        nonlocal since
        now = time.monotonic()
        written.add_seconds(_part_of(path, snapshot.roles), now - since)
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


def _add_exported(ranks: list[RankFiles], exported: Exported, roles: list[str]) -> None:
    """Add the exported files, which are on the leader's disk, to the leader's report, and each rank's seconds to that
    rank's report."""
    ranks[0].files += exported.files
    for rank, seconds in zip(ranks, exported.seconds, strict=True):
        for folder, spent in seconds.items():
            rank.add_seconds(_part_of(folder, roles), spent)


def _part_of(path: str, roles: list[str]) -> str:
    top = path.partition("/")[0]
    return top if top in (*roles, REFERENCE.partition("/")[0]) else "other"


def _by_part(manifest: Manifest, ranks: list[RankFiles]) -> dict[str, Throughput]:
    sizes: Counter[str] = Counter()
    linked = {name for folder in manifest.linked for name in manifest.in_folder(folder)}
    for name in manifest.files.keys() - linked:
        sizes[_part_of(name, manifest.roles)] += manifest.files[name]["size"]
    return {
        part: Throughput(size, max(rank.seconds.get(part, 0.0) for rank in ranks))
        for part, size in sorted(sizes.items())
    }


def complete(
    run_dir: Path,
    snapshot: Snapshot,
    identity: Identity,
    pending: PendingCheckpoint,
    ranks: list[RankFiles],
    coordinator: Coordinator,
) -> Commit:
    """Return indices and manifest of all ranks' files, on the leader. Raises ValueError for inconsistent files."""
    indices = {
        f"{folder}/{INDEX}": merge_shares(tensor_table(snapshot.components[folder]), [r.indices[folder] for r in ranks])
        for folder in ranks[0].indices
    }
    everywhere = [hash_in_memory(path, content) for path, content in indices.items()]
    by_domain = {domain: list(everywhere) for domain in coordinator.domain_leaders}
    for domain, written in zip(coordinator.domains, ranks, strict=True):
        by_domain[domain] += written.files
    entries = over_domains([describe(files) for files in by_domain.values()], coordinator)
    manifest = _manifest(run_dir, snapshot, identity, pending, entries, len(ranks))
    return Commit(manifest, indices, (manifest.total_bytes, _by_part(manifest, ranks)))


def _manifest(
    run_dir: Path, snapshot: Snapshot, identity: Identity, pending: PendingCheckpoint, written: Entries, world_size: int
) -> Manifest:
    linked = dict(chain(*(entries.items() for entries in pending.linked.values())))
    sources = [(folder, snapshot.unchanged[folder]) for folder in pending.linked]
    return Manifest(
        step=snapshot.step,
        world_size=world_size,
        contents=snapshot.contents,
        roles=snapshot.roles,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        **vars(identity),
        files=written | linked,
        linked={folder: source.name if source.parent == run_dir else str(source) for folder, source in sources},
        metrics=snapshot.metrics,
    )


def _copied(root: Path, commit: Commit | None, copies: int, coordinator: Coordinator) -> Commit | None:
    """Copy the files of each domain to other domains. Return the leaders' `commit` with the copies in its manifest."""
    own = {} if commit is None else {name: e for name, e in commit.manifest.files.items() if DOMAINS in e}
    copy_to_nodes(root, coordinator.broadcast(own), copies, coordinator)
    if commit is None:
        return None
    files = with_copies(commit.manifest.files, coordinator.domain_leaders, copies)
    return replace(commit, manifest=replace(commit.manifest, files=files))


def _write_indices(root: Path, commit: Commit | None) -> None:
    assert commit is not None
    for path, content in commit.indices.items():
        write_file(root, path, [content])
