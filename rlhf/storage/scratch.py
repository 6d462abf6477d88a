"""Scratch folders for what must not outlive a process: temporary files, sockets, shared memory."""

import fcntl
import logging
import os
import re
import secrets
import tempfile
from contextlib import ExitStack, suppress
from multiprocessing import shared_memory
from pathlib import Path
from types import TracebackType
from typing import Any

from rlhf.storage.files import make_private_dir, remove_dir, remove_file

SHARED_MEMORY = Path("/dev/shm")
LONGEST = 50
"""Characters of the folder that holds scratch folders: a UNIX socket's path has at most 107, and vLLM adds 36."""
_NAME = re.compile(r"rlhf\.[0-9a-f]{12}")

log = logging.getLogger(__name__)


class Scratch:
    """Folder of this process, and a prefix for names in /dev/shm; `close` removes what has them.

    A process that is killed leaves both. The kernel lets go of its lock on the folder then, by which the next Scratch
    of this user on this machine knows that they are nobody's any more, and removes them.
    """

    def __init__(self, *, large: bool = False) -> None:
        where = Path(tempfile.gettempdir())
        # What is large goes where the user has room for it, and has no sockets.
        where = where if large or len(str(where)) <= LONGEST else Path("/tmp")
        sweep(where)
        self._lock: int | None = None
        while self._lock is None:  # another one's sweep may come between the two
            self.folder = where / f"rlhf.{secrets.token_hex(6)}"
            make_private_dir(self.folder)
            try:
                self._lock = lock_folder(self.folder)
            except OSError as error:
                remove_dir(self.folder, ignore_errors=True)
                raise OSError(f"No folder in {where} can be locked ({error}); set TMPDIR to another place.") from error

    @property
    def name(self) -> str:
        """The beginning of names in /dev/shm."""
        return self.folder.name

    def close(self) -> None:
        """Remove the folder and the shared memory of its name."""
        if self._lock is not None:
            lock, self._lock = self._lock, None
            _remove(self.folder)
            os.close(lock)

    def __enter__(self) -> "Scratch":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def sweep(where: Path) -> None:
    """Remove the scratch folders of this user in `where` whose processes are no more, with their shared memory."""
    for folder in where.glob("rlhf.*"):
        if not _NAME.fullmatch(folder.name) or not _is_ours(folder):
            continue
        with suppress(OSError):  # leftovers stop nobody
            lock = lock_folder(folder)
            if lock is not None:
                _remove(folder)
                os.close(lock)


def lock_folder(folder: Path) -> int | None:
    """A descriptor with the lock on `folder`, held until it is closed or the process ends; None where it is another's
    or gone. Raises OSError on a file system without locks."""
    with ExitStack() as stack, suppress(FileNotFoundError, BlockingIOError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        stack.callback(os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), folder.stat()):
            stack.pop_all()
            return descriptor
    return None


def name_shared_memory(beginning: str = "psm_") -> None:
    """Let multiprocessing begin the names of new shared memory of this process so, by default as it always does."""
    module: Any = shared_memory
    module._SHM_NAME_PREFIX = f"/{beginning}"
    module._SHM_SAFE_NAME_LENGTH = len(beginning) + 9


def _is_ours(folder: Path) -> bool:
    try:
        return not folder.is_symlink() and folder.is_dir() and folder.stat().st_uid == os.geteuid()
    except OSError:
        return False


def _remove(folder: Path) -> None:
    """Remove a scratch folder; leftovers that cannot be removed stop nobody."""
    for path in SHARED_MEMORY.glob(f"*{folder.name}*"):
        try:
            remove_file(path, missing_ok=True)
        except OSError as error:
            log.warning("Shared memory of a process that is no more cannot be removed: %s.", error)
    # With its name goes what tells others that it is a scratch folder, so this comes last.
    remove_dir(folder, ignore_errors=True)
