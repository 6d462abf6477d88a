"""Caches tokenized prompts: one process makes each set, and all ranks of all runs map the set into memory.

```
<data.cache_dir>/
  KEY/{prompts.arrow,about.json}   a set, under the hash of all its inputs; renamed to KEY when complete
  KEY.lock                         locked by the process that makes the set
  files/HASH.json                  the hash of a data file, with the inode, size and times that it had when hashed
  .tmp-KEY-...                     unfinished, perhaps after a kill; the next process that makes the set removes it
```
"""

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rlhf.data.prompt_file import DamagedPrompts, MappedPrompts
from rlhf.errors import UserError
from rlhf.ranks.lock import lock_if_free
from rlhf.storage.files import make_dir, remove_dir, rename
from rlhf.storage.layout import TEMPORARY, fresh_name

log = logging.getLogger(__name__)

FOLDER = "rlhf_prompts"
POLL_S = 0.1
STALLED_S = 600.0


def cache_folder(setting: str | None) -> Path:
    """Return `data.cache_dir`; if null, the folder `rlhf_prompts` in the cache of Hugging Face datasets."""
    if setting is not None:
        return Path(setting).expanduser()
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(os.environ.get("HF_DATASETS_CACHE") or Path(home, "datasets")).expanduser() / FOLDER


def open_or_make(folder: Path, key: str, make: Callable[[Path], None]) -> MappedPrompts:
    """Return the set `key` of the cache `folder`. If it is missing or damaged, one process calls `make`; others wait.

    Raises:
        NotPlain: the prompts have a value that the cache cannot store.
        UserError: the other process wrote nothing for STALLED_S seconds, the folder cannot be read or written, or
            `make` raises a UserError.
    """
    entry, logged, grown_at, last_size = folder / key, False, time.monotonic(), -1
    while (prompts := _open(entry)) is None:
        with _writable(folder), _lock(folder, key) as locked:
            if locked:
                # Another process may have made the set before this process got the lock.
                prompts = _open(entry)
                return _make(entry, make) if prompts is None else prompts
        if (size := _size_of_unfinished(folder, key)) != last_size:
            grown_at, last_size = time.monotonic(), size
        elif time.monotonic() - grown_at > STALLED_S:
            raise UserError(
                f"data.cache_dir={folder}: the process that tokenizes the prompts has written nothing for "
                f"{STALLED_S:g} s. Find this process with `fuser {folder / key}.lock`, end it and run the same command "
                "again."
            )
        if not logged:
            logged = True
            log.info("Waiting for another process that tokenizes the prompts into %s.", entry)
        time.sleep(POLL_S)
    return prompts


def _open(entry: Path) -> MappedPrompts | None:
    try:
        return MappedPrompts(entry)
    except PermissionError as error:
        raise UserError(
            f"data.cache_dir={entry.parent}: no permission to read {error.filename or entry}. Ask its owner, or set "
            "data.cache_dir to your own folder."
        ) from error
    except (FileNotFoundError, NotADirectoryError):
        return None
    except DamagedPrompts as error:
        log.warning("%s. The prompts are tokenized again.", error)
        return None


@contextmanager
def _lock(folder: Path, key: str) -> Iterator[bool]:
    make_dir(folder)
    with lock_if_free(folder / f"{key}.lock", "data.cache_dir") as locked:
        yield locked


def _make(entry: Path, make: Callable[[Path], None]) -> MappedPrompts:
    started = time.monotonic()
    if entry.exists():
        rename(entry, entry.with_name(fresh_name(TEMPORARY, entry.name)))
    for leftover in _unfinished(entry.parent, entry.name):
        remove_dir(leftover, ignore_errors=True)  # over NFS, a file that is still open cannot be removed
    temporary = entry.with_name(fresh_name(TEMPORARY, entry.name))
    log.info("Tokenizing the prompts into %s; later starts reuse them.", entry)
    try:
        make(temporary)
        rename(temporary, entry)  # not synced: a set that a power cut damages is tokenized again
    except BaseException:
        remove_dir(temporary, ignore_errors=True)
        raise
    prompts = MappedPrompts(entry)
    log.info("Tokenized %d prompts into %s in %.1f s.", len(prompts), entry, time.monotonic() - started)
    return prompts


def _unfinished(folder: Path, key: str) -> list[Path]:
    return list(folder.glob(f"{TEMPORARY}{key}-*"))


def _size_of_unfinished(folder: Path, key: str) -> int:
    size = 0
    for path in (path for temporary in _unfinished(folder, key) for path in temporary.rglob("*")):
        with suppress(FileNotFoundError):
            size += path.stat().st_size
    return size


@contextmanager
def _writable(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"data.cache_dir={folder}: cannot store the tokenized prompts there ({error.strerror or error}). Free "
            "disk space, or set data.cache_dir to a writable folder on another disk."
        ) from error
