"""Names, leases and measures the folder in memory (tmpfs) where a node stores a run's snapshots. Imports no torch.

A folder belongs to one run directory and run id. The lease is a file lock in the folder; a living run holds the lock on
each of its nodes. A run that gives up the lease removes the folder, unless the folder has a snapshot.
"""

import logging
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash

from rlhf.errors import UserError
from rlhf.ranks.lock import lock_if_free, shared_lock
from rlhf.storage.files import make_private_dir, remove_dir, renew
from rlhf.storage.layout import scan

log = logging.getLogger(__name__)
SETTING = "checkpoint.memory.dir"
PREFIX = "rlhf-snapshots-"
LEASE = "lease.lock"
LEASE_S = 3600.0
"""For this many seconds after a dead run's last start or snapshot, other runs do not remove the dead run's folder,
because the run may resume."""
SNAPSHOTS = 2
"""Snapshots that are kept."""
IN_MEMORY = ("tmpfs", "ramfs")
MOUNTS = Path("/proc/self/mounts")


def memory_folder(base: str | Path, run_dir: Path, run_id: str) -> Path:
    """Return the folder for the snapshots of a run."""
    return Path(base) / f"{_prefix_of(run_dir)}{_short(run_id)}"


def _prefix_of(run_dir: Path) -> str:
    return f"{PREFIX}{os.geteuid()}-{_short(os.path.realpath(run_dir))}-"


def _short(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(os.fsencode(text))


def folders_of(base: str | Path, run_dir: Path) -> list[Path]:
    """Return this user's folders for any run of `run_dir`."""
    return [path for path in _folders(Path(base)) if path.name.startswith(_prefix_of(run_dir))]


def _folders(base: Path) -> list[Path]:
    """Return this user's folders. All users can write to /dev/shm, so check the owner besides the name."""
    try:
        return [path for path in sorted(base.glob(f"{PREFIX}{os.geteuid()}-*")) if _is_private(path)]
    except OSError:
        return []


def _is_private(path: Path) -> bool:
    try:
        status = path.lstat()
    except OSError:  # another process has removed the folder
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def make_folder(folder: Path) -> None:
    """Create the folder for this user alone. Raise UserError if it cannot be created, is on a disk, or not private."""
    base = folder.parent
    if not base.is_dir():
        raise UserError(f"{SETTING}={base} does not exist. Set it to a folder on a tmpfs of this machine.")
    if (kind := _file_system_of(base)) not in IN_MEMORY:
        raise UserError(
            f"{SETTING}={base} is on a disk ({kind}), but snapshots must be in memory. Set it to a folder on a tmpfs, "
            "or set checkpoint.memory.freq=0."
        )
    try:
        make_private_dir(folder)
    except FileExistsError:
        if not _is_private(folder):
            raise UserError(
                f"{folder} belongs to another user, or others may enter it. Remove it, or set another {SETTING}."
            ) from None
    except PermissionError as error:
        raise UserError(f"{SETTING}={base} is not writable ({error.strerror}). Set another {SETTING}.") from None


def _file_system_of(folder: Path) -> str:
    """Return the type of the file system of `folder`; empty if the system does not report it."""
    real, found = os.path.realpath(folder), (0, "")
    try:
        lines = MOUNTS.read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        _, point, kind, *_ = line.split(" ")
        point = point.encode().decode("unicode_escape")  # the kernel writes a space as \040
        if (real == point or real.startswith(point.rstrip("/") + "/")) and len(point) >= found[0]:
            found = len(point), kind
    return found[1]


@contextmanager
def lease(folder: Path) -> Iterator[None]:
    """Create the folder, and lock it while the `with` body runs. Then remove the folder unless it has a snapshot."""
    while True:
        make_folder(folder)
        with shared_lock(folder / LEASE, SETTING):
            if not (folder / LEASE).exists():
                continue  # another start has just removed the folder
            renew(folder / LEASE)
            try:
                yield
            finally:
                if not scan(folder):
                    remove_dir(folder, ignore_errors=True)
            return


def remove_abandoned(base: str | Path, run_dir: Path, keep: Path | None = None) -> None:
    """Remove the folders of dead runs, never a living run's folder.

    Remove folders of `run_dir`, except `keep`, at any age. Remove other folders `LEASE_S` seconds after their run's
    last start or snapshot. The caller must have the lock of `run_dir`.
    """
    own = folders_of(base, run_dir)
    for folder in _folders(Path(base)):
        if folder == keep or (folder not in own and not _is_old(folder)):
            continue
        try:
            with lock_if_free(folder / LEASE, SETTING) as is_free:
                if is_free:
                    remove_dir(folder)
                    log.info("Removed %s, a dead run's snapshots in memory.", folder)
        except OSError as error:
            log.warning("%s, a dead run's snapshots in memory, cannot be removed: %s", folder, error)


def _is_old(folder: Path) -> bool:
    """Return whether the run's last start and last publication are at least `LEASE_S` seconds ago."""
    try:
        times = [path.stat().st_mtime for path in (folder, folder / LEASE) if path.exists()]
    except OSError:
        return False
    return bool(times) and time.time() - max(times) > LEASE_S


def bytes_used(folders: list[Path]) -> int:
    """Return the bytes of memory of all files in `folders`."""
    used = 0
    for folder in folders:
        for where, _, names in os.walk(folder):
            for name in names:
                try:
                    used += (Path(where) / name).lstat().st_blocks * 512
                except OSError:  # a process is deleting the file
                    continue
    return used


def free_bytes(base: str | Path) -> int | None:
    """Return the bytes that the tmpfs of `base` has free; None if it has no limit, or `base` does not exist."""
    try:
        stats = os.statvfs(base)
    except OSError:
        return None
    return stats.f_bavail * stats.f_frsize if stats.f_blocks else None


def check_room(base: str, run_dir: Path, needed: int, replicas: int = 0) -> None:
    """Raise UserError if the tmpfs of `base` has less than `needed` bytes, counting this run's own files as free.

    `replicas`: the number of nodes whose snapshots are copied to this node (`checkpoint.memory.replicas`).
    """
    free = free_bytes(base)
    if free is not None and (room := free + bytes_used(folders_of(base, run_dir))) < needed:
        raise UserError(
            "checkpoint.memory.freq: two snapshots of this node's ranks and the one being written"
            f"{copies_text(replicas)} need {needed / 2**20:.1f} MiB, but {SETTING}={base} has {room / 2**20:.1f} MiB "
            f"free. Enlarge the tmpfs (`mount -o remount,size=SIZE`; docker: --shm-size), set {SETTING} to another "
            f"tmpfs, or set {less_memory(replicas)}."
        )


def copies_text(replicas: int) -> str:
    """Return the words for the copies of other nodes' snapshots."""
    nodes = "another node" if replicas == 1 else f"{replicas} other nodes"
    return f", each with the part of {nodes}," if replicas else ""


def less_memory(replicas: int) -> str:
    """Return the settings with which a run needs less memory for snapshots."""
    return f"{'checkpoint.memory.replicas=0 or ' if replicas else ''}checkpoint.memory.freq=0"
