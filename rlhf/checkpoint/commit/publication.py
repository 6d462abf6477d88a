"""Publishes a checkpoint on every storage domain in two phases; a single disk is one domain.

1. Every domain seals: its files and its manifest are durable under a temporary name.
2. When all domains have sealed, every domain renames its directory. Then every domain updates its pointer.

A kill leaves the old state or the new state on each disk. After a kill between two disks' renames, the next start
completes the checkpoint (`roll_forward`).
"""

import logging
from collections.abc import Iterable
from pathlib import Path

import xxhash

from rlhf.checkpoint.commit.manifest import DOMAINS, Manifest, manifest_bytes, parse_manifest, write_manifest
from rlhf.checkpoint.commit.pointer import point_to
from rlhf.checkpoint.commit.removal import discard
from rlhf.errors import UserError
from rlhf.events import announce
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.transport import LostPeer
from rlhf.storage.disk_errors import DamagedCheckpoint, SaveFailed, is_unfixable
from rlhf.storage.files import fsync_dir, fsync_tree, make_new_dir, rename
from rlhf.storage.layout import MANIFEST, TEMPORARY, fresh_name, scan, step_dir, step_of

log = logging.getLogger(__name__)


def temporary_name(step: int) -> str:
    return fresh_name(TEMPORARY, step_dir(Path(), step).name)


def begin(run_dir: Path, step: int) -> Path:
    """Create a uniquely named temporary directory for the checkpoint of `step` in `run_dir`."""
    temporary = run_dir / temporary_name(step)
    make_new_dir(temporary)
    return temporary


def publish(run_dir: Path, temporary: Path, step: int, manifest: Manifest | None, coordinator: Coordinator) -> Path:
    """Commit the directory `temporary` of every storage domain as the checkpoint of `step`. Collective.

    `temporary` has the same name in all domains. Only domain leaders need `manifest`. Raises SaveFailed on every rank
    if a file is missing, a disk fails, or the step is already published (nothing overwrites a published checkpoint).
    Raises LostPeer if a rank is lost after the renames.
    """
    renamed: list[Path] = []

    def seal() -> None:
        assert manifest is not None
        _seal(temporary, manifest, coordinator)

    try:
        coordinator.on_domain_leaders(seal)
        coordinator.on_domain_leaders(lambda: _rename_final(run_dir, temporary, step, renamed))
    except Exception as error:
        raise abort_save(run_dir, step, temporary, coordinator, error, renamed) from error
    coordinator.on_domain_leaders(lambda: _update_pointer(run_dir, step, "commit.published"))
    return step_dir(run_dir, step)


def abort_save(
    run_dir: Path,
    step: int,
    temporary: Path | None,
    coordinator: Coordinator,
    error: Exception,
    renamed: Iterable[Path] = (),
) -> SaveFailed:
    """Clean up this rank's storage domain after a save that failed with `error`. Return the error to raise."""
    message = f"The checkpoint of step {step} in {run_dir} was not saved; earlier checkpoints are intact. {error}."
    failed = SaveFailed(message, unfixable=is_unfixable(error) or isinstance(error, UserError))
    lost = isinstance(error, LostPeer)
    if not coordinator.leads_domain or (lost and len(coordinator.domain_leaders) > 1):
        # The lost domain may have published its part. The next start completes or removes this domain's part.
        return failed
    for path in (temporary, *(() if lost else renamed)):
        try:
            if path is not None and path.exists():
                discard(path)
        except OSError as problem:
            # Only log: an exception would hide why the save failed, and the ranks would raise different errors.
            log.warning("%s could not be removed (%s); the next start removes it.", path, problem)
    return failed


def roll_forward(run_dir: Path, coordinator: Coordinator) -> None:
    """Complete commits that a kill interrupted after some storage domains had renamed their directories.

    The other domains have sealed their directories, because a domain renames only after all domains have sealed.
    Collective; call this only while no save is in flight.
    """
    if not any(coordinator.on_domain_leaders(lambda: _sealed(run_dir))):
        return
    named = coordinator.on_domain_leaders(lambda: {step_of(path): _manifest_hash(path) for path in scan(run_dir)})

    def complete() -> None:
        for temporary, sealed in _sealed(run_dir).items():
            step = _step_of_temporary(temporary)
            # If a manifest is unreadable here or elsewhere, publish anyway: the files beside it may be intact.
            committed = any(
                step in there and (there[step] == sealed or None in (there[step], sealed)) for there in named
            )
            if step is not None and committed and not step_dir(run_dir, step).exists():
                _rename_final(run_dir, temporary, step, [])
                _update_pointer(run_dir, step)
                log.warning("Completed the commit of step %d, interrupted between the nodes' disks.", step)

    coordinator.on_domain_leaders(complete)


def _seal(temporary: Path, manifest: Manifest, coordinator: Coordinator) -> None:
    """Write the manifest and make all names durable. After that, one rename publishes this domain's files."""
    for name, entry in manifest.files.items():
        if coordinator.domain in entry.get(DOMAINS, [coordinator.domain]) and not (temporary / name).is_file():
            raise FileNotFoundError(
                f"rank {coordinator.rank} cannot find {name} after it was written. Set trainer.default_local_dir to a "
                "folder on a file system that shows new files on all nodes."
            )
    announce("commit.manifest")
    write_manifest(temporary, manifest)
    # Promise 2: each file's content is synced already. Sync the directory entries before the rename publishes them.
    fsync_tree(temporary)
    if len(coordinator.domain_leaders) > 1:
        # After one domain's rename, the other domains must find their sealed directories to complete the commit.
        fsync_dir(temporary.parent)


def _rename_final(run_dir: Path, temporary: Path, step: int, renamed: list[Path]) -> None:
    """Rename a sealed directory to its final name, durably. Raise FileExistsError if the step is published already.

    Append the final path to `renamed` right after the rename, even if the sync fails.
    """
    final = step_dir(run_dir, step)
    announce("commit.rename")
    if final.exists():
        # Promise 3.
        raise FileExistsError(f"{final} exists already; a published checkpoint is never overwritten")
    # Promise 1: before this rename the final name does not exist; after the rename the checkpoint is complete.
    renamed.append(rename(temporary, final))
    fsync_dir(run_dir)


def _update_pointer(run_dir: Path, step: int, event: str | None = None) -> None:
    """Point to a published step, and announce `event`. If the pointer can't be written, the step stays published."""
    announce("commit.pointer")
    try:
        point_to(run_dir, step)
    except OSError as error:
        log.error("The pointer in %s could neither be written nor removed: %s", run_dir, error)
    if event is not None:
        announce(event)


def _sealed(run_dir: Path) -> dict[Path, str | None]:
    """Map each temporary directory that has a manifest to the manifest's hash, or to None if it is damaged."""
    return {
        path: _manifest_hash(path)
        for path in run_dir.iterdir()
        if _step_of_temporary(path) is not None and (path / MANIFEST).exists()
    }


def _step_of_temporary(path: Path) -> int | None:
    name = path.name
    return step_of(Path(name.removeprefix(TEMPORARY).rpartition("-")[0])) if name.startswith(TEMPORARY) else None


def _manifest_hash(path: Path) -> str | None:
    try:
        raw = manifest_bytes(path)
        parse_manifest(raw, path / MANIFEST)
        return xxhash.xxh3_128_hexdigest(raw)
    except (DamagedCheckpoint, OSError):
        return None
