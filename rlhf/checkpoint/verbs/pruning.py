"""Prunes the directory of a stopped run: removes checkpoints as retention would, and leftovers of killed runs.

The run's lock makes sure that no save is in flight and no other process removes checkpoints. Imports no torch.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rlhf.checkpoint.commit.deleter import Deleter
from rlhf.checkpoint.commit.manifest import DOMAINS, Manifest, read_manifest
from rlhf.checkpoint.commit.output_folder import INCOMPLETE, REPLACED, is_only_output
from rlhf.checkpoint.commit.pointer import point_to_newest
from rlhf.checkpoint.commit.removal import clean_leftovers, delete
from rlhf.checkpoint.commit.retention import remove_checkpoints, victims
from rlhf.config.schema.checkpoint import CheckpointConfig
from rlhf.errors import UserError
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.lock import run_lock, wait_for_ranks
from rlhf.ranks.transport import Transport
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.layout import MANIFEST, TEMPORARY, TRASH, UPLOAD, scan, set_aside_dirs, step_of
from rlhf.storage.scratch import lock_folder

RANKS_S = 5.0
"""Seconds to wait until the ranks of an earlier start have ended."""
ASIDE = ("damaged", "superseded", "incomplete")


@dataclass(frozen=True)
class PruningPlan:
    """Lists removals from a run directory. `newest` is the step of the newest intact checkpoint, or None: then nothing
    is removed, since damaged checkpoints may be all that is left."""

    run_dir: Path
    rules: CheckpointConfig
    newest: int | None
    checkpoints: list[Path] = field(default_factory=list)
    aside: list[Path] = field(default_factory=list)
    leftovers: list[Path] = field(default_factory=list)

    @property
    def going(self) -> list[Path]:
        return [*self.checkpoints, *self.aside, *self.leftovers]


def plan_pruning(
    run_dir: Path, rules: CheckpointConfig, *, set_aside: bool, verify: Callable[[Path], Manifest]
) -> PruningPlan:
    """Plan the removals by `rules`, and with `set_aside` also of directories that were set aside. `verify` returns the
    manifest of an intact checkpoint, or raises DamagedCheckpoint or OSError. Raises UserError for checkpoints on
    several disks, because the disks could then keep different steps."""
    leftovers = sorted(path for path in run_dir.iterdir() if _is_leftover(path))
    for path in [*scan(run_dir), *leftovers]:
        _reject_domains(run_dir, path)
    newest = next((step_of(path) for path in scan(run_dir) if _is_whole(path, verify)), None)
    if newest is None:
        return PruningPlan(run_dir, rules, None)  # promise 10
    single_process = Coordinator(Transport())
    aside = [path for reason in ASIDE for path in set_aside_dirs(run_dir, reason)] if set_aside else []
    # Promise 9.
    return PruningPlan(run_dir, rules, newest, victims(run_dir, rules, newest, single_process), aside, leftovers)


@contextmanager
def run_at_rest(run_dir: Path) -> Iterator[None]:
    """Lock a run directory; raises UserError when the run, or a rank of an earlier start, is alive."""
    # Promise 12.
    with run_lock(run_dir, "Wait for the run or stop it, then prune."):
        wait_for_ranks(run_dir, RANKS_S)
        yield


def remove_planned(plan: PruningPlan) -> list[Path]:
    """Rename and delete the paths of `plan`; return the paths that remain. Call this within `run_at_rest`."""
    if not plan.going:
        return []
    point_to_newest(plan.run_dir)
    deleter = Deleter()
    remove_checkpoints([*plan.checkpoints, *plan.aside], deleter)
    for path in plan.leftovers:
        if not path.name.startswith((TEMPORARY, TRASH)):
            delete(path)
    while not deleter.wait(1.0):
        pass
    clean_leftovers(plan.run_dir)
    left = [path for path in plan.run_dir.iterdir() if path.name.startswith(TRASH)]
    return [*left, *(path for path in plan.going if path.exists() and path not in left)]


def bytes_freed(going: Iterable[Path]) -> dict[Path, int]:
    """Return the bytes that each removal frees. A file with several hard links is freed with the last of its links.

    Paths that a run has removed meanwhile are absent.
    """
    names: dict[tuple[int, int], int] = {}
    freed = {}
    for root in going:
        freed[root] = 0
        for path in _files(root):
            try:
                status = path.lstat()
            except FileNotFoundError:
                continue
            key = status.st_dev, status.st_ino
            names[key] = names.get(key, 0) + 1
            freed[root] += status.st_size if names[key] == status.st_nlink else 0
    return {root: size for root, size in freed.items() if os.path.lexists(root)}


def _files(root: Path) -> Iterator[Path]:
    if root.is_symlink() or not root.is_dir():
        yield root
    for folder, _, names in os.walk(root):
        yield from (Path(folder, name) for name in names)


def _is_whole(path: Path, verify: Callable[[Path], Manifest]) -> bool:
    try:
        verify(path)
    except (DamagedCheckpoint, OSError):
        return False
    return True


def _is_leftover(path: Path) -> bool:
    if path.name.startswith((INCOMPLETE, REPLACED)):
        return _is_abandoned(path) and not is_only_output(path)
    return path.name.startswith((TEMPORARY, TRASH, UPLOAD))


def _is_abandoned(path: Path) -> bool:
    """Return whether no living process writes a verb's output folder."""
    try:
        lock = lock_folder(path)
    except OSError:
        return False
    if lock is not None:
        os.close(lock)
    return lock is not None


def _reject_domains(run_dir: Path, path: Path) -> None:
    try:
        manifest = read_manifest(path)
    except (DamagedCheckpoint, OSError):
        return
    if any(DOMAINS in entry for entry in manifest.files.values()):
        raise UserError(
            f"{run_dir} has only a part of each checkpoint; other disks have the rest ({path.name}/{MANIFEST}). Set "
            "checkpoint.max_to_keep: the run then removes a step from all disks after a save."
        )
