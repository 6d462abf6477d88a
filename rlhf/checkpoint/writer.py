"""From a snapshot to a committed checkpoint: every rank writes its files, the leader proves and publishes the whole.

Needs only the snapshot, the directory and a coordinator, so it can run beside the training as well as in front of it.
"""

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from rlhf.checkpoint import commit, retention
from rlhf.checkpoint.coordinator import Coordinator
from rlhf.checkpoint.errors import SaveFailed, is_unfixable
from rlhf.checkpoint.files import WrittenFile, write_file, write_json
from rlhf.checkpoint.layout import REFERENCE, rank_file, step_dir
from rlhf.checkpoint.load import Transfer
from rlhf.checkpoint.manifest import Manifest, describe
from rlhf.checkpoint.reaper import Reaper
from rlhf.checkpoint.room import make_room
from rlhf.checkpoint.snapshot import Snapshot
from rlhf.checkpoint.tensors import INDEX, merge_indices, safetensors_chunks, write_pieces
from rlhf.config.checkpoint import CheckpointConfig

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
    by_part: dict[str, Transfer] = field(default_factory=dict)
    blocked_seconds: float = 0.0
    wait_seconds: float = 0.0

    def metrics(self) -> dict[str, float]:
        """Seconds, bytes and bytes per second: of all under `perf/save_*`, of each part under `perf/save_*/PART`."""
        figures = {
            "perf/save_blocked_seconds": self.blocked_seconds,
            "perf/save_wait_seconds": self.wait_seconds,
        }
        named = {"": Transfer(self.total_bytes, self.seconds)}
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
    """What comes before the bytes. Collective; raises SaveFailed on every rank when the leader fails."""

    def begin() -> Draft:
        root = commit.begin(run_dir, snapshot.step)
        return Draft(root, _link(root, snapshot.unchanged))

    try:
        # The leader tries, and its outcome is everyone's: either no rank writes its part of such a component, or all do.
        return coordinator.on_leader(begin)
    except Exception as error:
        raise _failed(snapshot, run_dir, error) from error


def write_checkpoint(
    snapshot: Snapshot,
    run_dir: Path,
    identity: Identity,
    coordinator: Coordinator,
    settings: CheckpointConfig,
    reaper: Reaper,
    draft: Draft | None = None,
    make_way: Callable[[], None] = lambda: None,
) -> SaveResult:
    """Commit `snapshot` (begun as `draft`) as `run_dir/global_step_N` and apply retention. Collective.

    Raises SaveFailed on every rank when any rank fails; nothing is left behind and the previous checkpoint is untouched.
    """
    started = time.monotonic()
    draft = draft or begin_checkpoint(snapshot, run_dir, coordinator)
    root, linked = draft.root, draft.linked
    try:
        needed = sum(coordinator.gather(snapshot.nbytes(linked))) + SLACK_BYTES
        early = coordinator.on_leader(lambda: _make_room(run_dir, needed, snapshot, settings, reaper, make_way))
        ranks = coordinator.everywhere(lambda: _write_part(root, snapshot, linked, coordinator.rank))
        manifest = coordinator.on_leader(lambda: _publish(run_dir, root, snapshot, identity, linked, ranks))
    except Exception as error:
        if coordinator.is_leader and root.exists():
            _discard(root)
        raise _failed(snapshot, run_dir, error) from error
    removed = early + coordinator.on_leader(lambda: retention.apply(run_dir, settings, snapshot.step, reaper))
    seconds, path = time.monotonic() - started, step_dir(run_dir, snapshot.step)
    return SaveResult(path, manifest.total_bytes, seconds, removed, _transfers(manifest, ranks))


def _failed(snapshot: Snapshot, run_dir: Path, error: Exception) -> SaveFailed:
    message = (
        f"The checkpoint of step {snapshot.step} in {run_dir} was not saved; earlier checkpoints are intact. {error}."
    )
    return SaveFailed(message, unfixable=is_unfixable(error))


def _discard(temporary: Path) -> None:
    try:
        commit.discard(temporary)
    except OSError as error:
        # Must not hide why the save failed, nor set this rank apart from the others.
        log.warning("%s could not be removed (%s); the next start does it.", temporary, error)


def _make_room(
    run_dir: Path,
    needed: int,
    snapshot: Snapshot,
    settings: CheckpointConfig,
    reaper: Reaper,
    make_way: Callable[[], None],
) -> list[int]:
    may_go = partial(retention.victims, run_dir, settings, snapshot.step, snapshot.metrics)
    return make_room(run_dir, needed, may_go, reaper, settings.timeout_s / 2, make_way)


def _link(root: Path, unchanged: dict[str, Path]) -> Linked:
    tried = {folder: commit.link(root, source, folder) for folder, source in unchanged.items()}
    return {folder: files for folder, files in tried.items() if files is not None}


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

    for folder, pieces in snapshot.components.items():
        if folder not in linked:
            files, written.indices[folder] = write_pieces(root, folder, rank_file(rank), pieces)
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


def _transfers(manifest: Manifest, ranks: list[_Written]) -> dict[str, Transfer]:
    sizes: Counter[str] = Counter()
    linked = {name for folder in manifest.linked for name in manifest.in_folder(folder)}
    for name in manifest.files.keys() - linked:
        sizes[_part_of(name, manifest.roles)] += manifest.files[name]["size"]
    return {part: Transfer(size, max(rank.seconds[part] for rank in ranks)) for part, size in sorted(sizes.items())}


def _publish(
    run_dir: Path,
    root: Path,
    snapshot: Snapshot,
    identity: Identity,
    linked: Linked,
    ranks: list[_Written],
) -> Manifest:
    written = [file for rank in ranks for file in rank.files]
    for file in written:
        if not (root / file.path).is_file():
            raise FileNotFoundError(
                f"{file.path} was written by another rank and is not there for rank 0: all nodes must share the file system of "
                "trainer.default_local_dir."
            )
    for folder in (folder for folder in snapshot.components if folder not in linked):
        written.append(write_json(root, f"{folder}/{INDEX}", merge_indices([rank.indices[folder] for rank in ranks])))
    manifest = Manifest(
        step=snapshot.step,
        world_size=len(ranks),
        backend=identity.backend,
        contents=snapshot.contents,
        roles=snapshot.roles,
        config_hash=identity.config_hash,
        fingerprints=identity.fingerprints,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=identity.versions,
        files=describe(written) | {name: entry for files in linked.values() for name, entry in files.items()},
        linked={folder: _name_of(snapshot.unchanged[folder], run_dir) for folder in linked},
        metrics=snapshot.metrics,
    )
    commit.publish(run_dir, root, manifest)
    return manifest


def _name_of(source: Path, run_dir: Path) -> str:
    return source.name if source.parent == run_dir else str(source)
