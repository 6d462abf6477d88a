"""Disk space for a save, made sure of before its first byte.

When it is short, what retention gives up after the save anyway goes before it.
"""

import errno
import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from rlhf.checkpoint.commit.deleter import Deleter
from rlhf.checkpoint.commit.manifest import verify
from rlhf.checkpoint.commit.removal import to_trash
from rlhf.events import announce
from rlhf.storage.disk_errors import DamagedCheckpoint
from rlhf.storage.layout import PIN, scan, step_of

log = logging.getLogger(__name__)
# Some file systems (btrfs, XFS, network ones) give the room of deleted files back a moment later.
SETTLE_S = 5.0
POLL_S = 0.1


def make_room(
    run_dir: Path,
    needed: int,
    victims: Callable[[], list[Path]],
    deleter: Deleter,
    timeout_s: float,
    make_way: Callable[[], None] = lambda: None,
) -> list[int]:
    """See to `needed` free bytes on the disk of `run_dir`; returns the steps of the checkpoints that were removed for
    it.

    First it calls `make_way`, which gives up whatever else keeps bytes of removed checkpoints on the disk (a copy to
    the remote), and waits for the trash that `deleter` is deleting, at most `timeout_s` seconds. Then it removes as
    many from the front of `victims()` as it takes: the checkpoints that retention will remove anyway, oldest first; but
    neither the newest intact one (which it reads whole to know) nor any later one. Raises OSError (ENOSPC) with the
    figures; when it can be known beforehand that all of them would not be enough, none is removed.
    """
    if _free(run_dir) >= needed:
        return []
    make_way()
    if not deleter.wait(0):
        _await_room(run_dir, needed, deleter, timeout_s)
    free = _free(run_dir)
    if free >= needed:
        return []
    may_go = _older_than_the_newest_intact(run_dir, victims())
    enough = next((n for n in range(1, len(may_go) + 1) if free + bytes_freed_by(may_go[:n]) >= needed), None)
    if enough is None:
        raise _too_little(run_dir, needed, may_go)
    going = may_go[:enough]
    log.warning(
        "The disk has %s free and the save needs %s: removing %s first, which retention gives up after this save.",
        _mib(free),
        _mib(needed),
        ", ".join(path.name for path in going),
    )
    for path in going:
        announce("commit.prune")
        deleter.take(to_trash(path))
    make_way()
    _await_room(run_dir, needed, deleter, timeout_s)
    if _free(run_dir) < needed:
        raise _too_little(run_dir, needed, may_go[enough:])
    return [step_of(path) or 0 for path in going]


def bytes_freed_by(paths: list[Path]) -> int:
    """Bytes on disk that go when all of `paths` go, and copies of them under way; a file that has another name
    stays."""
    names: Counter[tuple[int, int]] = Counter()
    freed = 0
    # A checkpoint that was moved elsewhere and linked gives back nothing.
    own = [path for path in paths if not path.is_symlink()]
    pins = [pin for path in own for pin in path.parent.glob(f"{PIN}{path.name}-*")]
    for root in [*own, *pins]:
        for folder, _, files in os.walk(root):
            for name in files:
                stat = (Path(folder) / name).lstat()
                names[stat.st_dev, stat.st_ino] += 1
                if names[stat.st_dev, stat.st_ino] == stat.st_nlink:
                    freed += stat.st_blocks * 512
    return freed


def _older_than_the_newest_intact(run_dir: Path, victims: list[Path]) -> list[Path]:
    """Those of `victims` that a crash before the next commit would not need."""
    if not victims:
        return []
    for path in scan(run_dir):
        try:
            verify(path)
        except (DamagedCheckpoint, OSError) as error:
            log.warning("%s is passed over: %s", path, error)
            continue
        return [victim for victim in victims if (step_of(victim) or 0) < (step_of(path) or 0)]
    return []


def _await_room(run_dir: Path, needed: int, deleter: Deleter, timeout_s: float) -> None:
    """Wait until the trash is gone and its room given back."""
    deleter.wait(timeout_s)
    end = time.monotonic() + SETTLE_S
    while _free(run_dir) < needed and time.monotonic() < end:
        time.sleep(POLL_S)


def _free(run_dir: Path) -> int:
    stats = os.statvfs(run_dir)
    return stats.f_bavail * stats.f_frsize


def _too_little(run_dir: Path, needed: int, may_go: list[Path]) -> OSError:
    text = f"the save needs {_mib(needed)} and the disk has {_mib(_free(run_dir))} free"
    if may_go:
        named = ", ".join(path.name for path in may_go)
        text += f"; removing {named}, which retention allows, would free only {_mib(bytes_freed_by(may_go))}"
    else:
        text += "; there is no checkpoint that may go before the new one is whole"
    return OSError(errno.ENOSPC, text, str(run_dir))


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
