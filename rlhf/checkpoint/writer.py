"""From a snapshot to a committed checkpoint: every rank writes its files, the leader proves and publishes the whole.

Needs only the snapshot, the directory and a coordinator, so it can run beside the training as well as in front of it.
"""

import errno
import logging
import os
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rlhf.checkpoint import commit
from rlhf.checkpoint.coordinator import Coordinator
from rlhf.checkpoint.errors import SaveFailed, is_unfixable
from rlhf.checkpoint.files import WrittenFile, write_file, write_json
from rlhf.checkpoint.layout import rank_file, step_dir
from rlhf.checkpoint.manifest import Manifest, describe
from rlhf.checkpoint.snapshot import Snapshot
from rlhf.checkpoint.tensors import INDEX, merge_indices, safetensors_chunks, write_pieces

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
    """Where a checkpoint was published, the bytes written by its manifest, and how long the save took."""

    path: Path
    total_bytes: int
    seconds: float
    removed_steps: list[int]


def write_checkpoint(
    snapshot: Snapshot, run_dir: Path, identity: Identity, coordinator: Coordinator, max_to_keep: int | None
) -> SaveResult:
    """Commit `snapshot` as `run_dir/global_step_N` and apply retention. Collective.

    Raises SaveFailed on every rank when any rank fails; nothing is left behind and the previous checkpoint is untouched.
    """
    started = time.monotonic()
    temporary: Path | None = None
    try:
        temporary = coordinator.on_leader(lambda: commit.begin(run_dir, snapshot.step))
        root = temporary
        # The leader tries, and its outcome is everyone's: either no rank writes its part of such a component, or all do.
        linked = coordinator.on_leader(lambda: _link(root, snapshot.unchanged))
        needed = sum(coordinator.gather(snapshot.nbytes(linked))) + SLACK_BYTES
        coordinator.on_leader(lambda: _check_room(run_dir, needed))
        parts = coordinator.everywhere(lambda: _write_part(root, snapshot, linked, coordinator.rank))
        path, total_bytes = coordinator.on_leader(lambda: _publish(run_dir, root, snapshot, identity, linked, parts))
    except Exception as error:
        if coordinator.is_leader and temporary is not None and temporary.exists():
            _discard(temporary)
        message = f"The checkpoint of step {snapshot.step} in {run_dir} was not saved; earlier checkpoints are intact. {error}."
        raise SaveFailed(message, unfixable=is_unfixable(error)) from error
    removed = coordinator.on_leader(lambda: _prune(run_dir, max_to_keep, snapshot.step))
    return SaveResult(path, total_bytes, time.monotonic() - started, removed)


def _discard(temporary: Path) -> None:
    try:
        commit.discard(temporary)
    except OSError as error:
        # Must not hide why the save failed, nor set this rank apart from the others.
        log.warning("%s could not be removed (%s); the next start does it.", temporary, error)


def _check_room(run_dir: Path, needed: int) -> None:
    stats = os.statvfs(run_dir)
    free = stats.f_bavail * stats.f_frsize
    if free < needed:
        text = f"the save needs {needed / 2**20:.1f} MiB and the disk has {free / 2**20:.1f} MiB free"
        raise OSError(errno.ENOSPC, text, str(run_dir))


def _link(root: Path, unchanged: dict[str, Path]) -> Linked:
    tried = {folder: commit.link(root, source, folder) for folder, source in unchanged.items()}
    return {folder: files for folder, files in tried.items() if files is not None}


def _write_part(root: Path, snapshot: Snapshot, linked: Linked, rank: int) -> tuple[list[WrittenFile], dict[str, dict]]:
    written: list[WrittenFile] = []
    indices = {}
    for folder, pieces in snapshot.components.items():
        if folder not in linked:
            files, indices[folder] = write_pieces(root, folder, rank_file(rank), pieces)
            written += files
    written += [write_file(root, path, safetensors_chunks(tensors)) for path, tensors in snapshot.whole_tensors.items()]
    written += [write_file(root, path, [content]) for path, content in snapshot.files.items()]
    return written, indices


def _publish(
    run_dir: Path,
    root: Path,
    snapshot: Snapshot,
    identity: Identity,
    linked: Linked,
    parts: list[tuple[list[WrittenFile], dict[str, dict]]],
) -> tuple[Path, int]:
    written = [file for files, _ in parts for file in files]
    for file in written:
        if not (root / file.path).is_file():
            raise FileNotFoundError(
                f"{file.path} was written by another rank and is not there for rank 0: all nodes must share the file system of "
                "trainer.default_local_dir."
            )
    for folder in (folder for folder in snapshot.components if folder not in linked):
        written.append(write_json(root, f"{folder}/{INDEX}", merge_indices([indices[folder] for _, indices in parts])))
    manifest = Manifest(
        step=snapshot.step,
        world_size=len(parts),
        backend=identity.backend,
        contents=snapshot.contents,
        roles=snapshot.roles,
        config_hash=identity.config_hash,
        fingerprints=identity.fingerprints,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=identity.versions,
        files=describe(written) | {name: entry for files in linked.values() for name, entry in files.items()},
        linked={folder: _name_of(snapshot.unchanged[folder], run_dir) for folder in linked},
    )
    commit.publish(run_dir, root, manifest)
    return step_dir(run_dir, snapshot.step), manifest.total_bytes


def _name_of(source: Path, run_dir: Path) -> str:
    return source.name if source.parent == run_dir else str(source)


def _prune(run_dir: Path, max_to_keep: int | None, step: int) -> list[int]:
    try:
        return commit.prune(run_dir, max_to_keep, step)
    except OSError as error:
        # The new checkpoint is published; an old one that cannot be removed costs room, not the run.
        log.error("An old checkpoint in %s could not be removed: %s", run_dir, error)
        return []
