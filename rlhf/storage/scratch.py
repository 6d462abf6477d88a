"""Creates scratch folders for temporary files, sockets and shared memory that must not outlive a process."""

import fcntl
import logging
import os
import re
import secrets
import tempfile
from contextlib import ExitStack, suppress
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

from rlhf.storage.files import make_private_dir, remove_dir, remove_file

SHARED_MEMORY = Path("/dev/shm")
LONGEST = 50
"""Maximum length of the parent folder's path. A UNIX socket's path has at most 107 bytes, and vLLM's name takes 36."""
_NAME = re.compile(r"rlhf\.[0-9a-f]{12}")

log = logging.getLogger(__name__)


class Scratch:
    """Creates a folder for this process and a prefix for names in /dev/shm; `close` removes them.

    A killed process leaves both, but the kernel releases the process's lock on the folder. So the next Scratch of this
    user on this machine recognises and removes the leftovers.
    """

    def __init__(self, *, large: bool = False) -> None:
        where = Path(tempfile.gettempdir())
        # Large content goes to the user's TMPDIR, which has the space. It includes no sockets, so a long path is fine.
        where = where if large or len(str(where)) <= LONGEST else Path("/tmp")
        sweep(where)
        self._lock: int | None = None
        while self._lock is None:  # another process' sweep may remove the folder before the lock
            self.folder = where / f"rlhf.{secrets.token_hex(6)}"
            make_private_dir(self.folder)
            try:
                self._lock = lock_folder(self.folder)
            except OSError as error:
                remove_dir(self.folder, ignore_errors=True)
                raise OSError(f"No folder in {where} can be locked ({error}); set TMPDIR to another folder.") from error

    @property
    def name(self) -> str:
        return self.folder.name

    def close(self) -> None:
        if self._lock is not None:
            lock, self._lock = self._lock, None
            _remove(self.folder)
            os.close(lock)

    def __enter__(self) -> "Scratch":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def sweep(where: Path) -> None:
    """Remove this user's scratch folders in `where` whose processes have ended, with their shared memory."""
    for folder in where.glob("rlhf.*"):
        if not _NAME.fullmatch(folder.name) or not _is_ours(folder):
            continue
        with suppress(OSError):  # leftovers do no harm
            lock = lock_folder(folder)
            if lock is not None:
                _remove(folder)
                os.close(lock)


def lock_folder(folder: Path) -> int | None:
    """Lock `folder` and return the descriptor; a close or the end of the process releases the lock. Return None when
    another process has the lock or the folder is missing. Raise OSError on a file system without locks."""
    with ExitStack() as stack, suppress(FileNotFoundError, BlockingIOError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        stack.callback(os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), folder.stat()):
            stack.pop_all()
            return descriptor
    return None


def set_shared_memory_prefix(beginning: str = "psm_") -> None:
    """Set the prefix of the names of multiprocessing's shared memory in this process (default: Python's own prefix)."""
    module: Any = shared_memory
    module._SHM_NAME_PREFIX = f"/{beginning}"
    module._SHM_SAFE_NAME_LENGTH = len(beginning) + 9


def _is_ours(folder: Path) -> bool:
    try:
        return not folder.is_symlink() and folder.is_dir() and folder.stat().st_uid == os.geteuid()
    except OSError:
        return False


def _remove(folder: Path) -> None:
    for path in SHARED_MEMORY.glob(f"*{folder.name}*"):
        try:
            remove_file(path, missing_ok=True)
        except OSError as error:
            log.warning("Shared memory of a dead process cannot be removed: %s.", error)
    # Other processes recognise a scratch folder by its name, so remove the folder last.
    remove_dir(folder, ignore_errors=True)
