"""Frees disk space before a save: removes checkpoints that retention would remove after the save."""

import errno
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from rlhf.checkpoint.commit.deleter import Deleter
from rlhf.checkpoint.commit.retention import remove_checkpoints
from rlhf.checkpoint.load.verification import newest_usable
from rlhf.ranks.coordinator import Coordinator
from rlhf.storage.layout import UPLOAD, step_of

log = logging.getLogger(__name__)
# Some file systems (btrfs, XFS, network ones) free the space of deleted files a little later.
SETTLE_S = 5.0
POLL_S = 0.1


def make_room(
    run_dir: Path,
    needed: int,
    victims: Callable[[], list[Path]],
    deleter: Deleter,
    timeout_s: float,
    coordinator: Coordinator,
    cancel_copy: Callable[[], None] = lambda: None,
) -> None:
    """Free space on each disk until `needed` bytes are free. Each storage domain (the ranks that see the same run
    directory) has one disk; the domain's leader passes `needed` for this disk. Collective.

    First call `cancel_copy`, which stops an upload whose checkpoint was removed. Wait at most `timeout_s` seconds for
    `deleter`. Then remove the first checkpoints of `victims()`, which retention will remove anyway (oldest first). Keep
    the newest checkpoint that a resume could load, and all later checkpoints. To find this checkpoint, every domain
    reads and verifies its part. All disks remove the same checkpoints. If the space would not suffice, remove nothing,
    and raise OSError (ENOSPC) on every rank.
    """

    def await_room() -> None:
        deleter.wait(timeout_s)
        end = time.monotonic() + SETTLE_S
        while _free(run_dir) < needed and time.monotonic() < end:
            time.sleep(POLL_S)

    def is_short() -> bool:
        if _free(run_dir) < needed:
            cancel_copy()
            if not deleter.wait(0):
                await_room()
        return _free(run_dir) < needed

    def await_removal() -> None:
        cancel_copy()
        await_room()
        if _free(run_dir) < needed:
            raise _disk_full(run_dir, needed, removable[len(chosen) :])

    if not any(coordinator.on_domain_leaders(is_short)):
        return
    # Promise 9: if the run crashes before the next commit, a resume needs no checkpoint before the newest usable one.
    found = victims()
    newest = newest_usable(run_dir, coordinator) if found else None
    removable = [] if newest is None else [path for path in found if (step_of(path) or 0) < (step_of(newest) or 0)]
    chosen = removable[: max(coordinator.on_domain_leaders(lambda: _count_to_remove(run_dir, needed, removable)))]
    coordinator.on_domain_leaders(lambda: remove_checkpoints(chosen, deleter))
    coordinator.on_domain_leaders(await_removal)


def _count_to_remove(run_dir: Path, needed: int, removable: list[Path]) -> int:
    """Return how many checkpoints from the front of `removable` this disk must remove.

    Raise OSError (ENOSPC) if even the removal of all of them would not suffice.
    """
    free = _free(run_dir)
    enough = next((n for n in range(len(removable) + 1) if free + bytes_freed_by(removable[:n]) >= needed), None)
    if enough is None:
        raise _disk_full(run_dir, needed, removable)
    if enough:
        log.warning(
            "The disk has %s free and the save needs %s: removing %s first, which retention would remove later.",
            _mib(free),
            _mib(needed),
            ", ".join(path.name for path in removable[:enough]),
        )
    return enough


def bytes_freed_by(paths: list[Path]) -> int:
    """Return the bytes freed by removing all `paths` and the hard links for their uploads. A file with other links
    stays."""
    names: Counter[tuple[int, int]] = Counter()
    freed = 0
    # Removing a symlink to a checkpoint elsewhere frees nothing here.
    own = [path for path in paths if not path.is_symlink()]
    links = [folder for path in own for folder in path.parent.glob(f"{UPLOAD}{path.name}-*")]
    for root in [*own, *links]:
        for folder, _, files in os.walk(root):
            for name in files:
                stat = (Path(folder) / name).lstat()
                names[stat.st_dev, stat.st_ino] += 1
                if names[stat.st_dev, stat.st_ino] == stat.st_nlink:
                    freed += stat.st_blocks * 512
    return freed


def _free(run_dir: Path) -> int:
    stats = os.statvfs(run_dir)
    return stats.f_bavail * stats.f_frsize if stats.f_blocks else sys.maxsize  # a tmpfs may have no limit


def _disk_full(run_dir: Path, needed: int, removable: list[Path]) -> OSError:
    text = f"the save needs {_mib(needed)} and the disk has {_mib(_free(run_dir))} free"
    if removable:
        named = ", ".join(path.name for path in removable)
        text += f"; removing {named}, which retention allows, would free only {_mib(bytes_freed_by(removable))}"
    else:
        text += "; no checkpoint may be removed before the new one is complete"
    return OSError(errno.ENOSPC, text, str(run_dir))


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
