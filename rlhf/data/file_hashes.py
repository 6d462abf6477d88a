"""Hashes of data files, remembered from start to start: a file is read again only when it may have changed."""

import json
import os
import time
from contextlib import suppress
from pathlib import Path

import xxhash

from rlhf.errors import UserError
from rlhf.storage.files import make_dir, write_small

CHUNK = 4 << 20
SETTLED_NS = 2_000_000_000
"""Age of a file's last change from which another one is certain to give it another time."""


def file_hash(path: Path, folder: Path, *, again: bool = False) -> str:
    """The xxh3-128 in hex of a data file, as the cache `folder` remembers it or read now.

    It is remembered for a file of the same inode, size and times of change, whose last one was over when it was read;
    with `again` nothing is trusted. Raises UserError for a file that cannot be read.
    """
    known = folder / "files" / f"{xxhash.xxh3_128_hexdigest(os.fsencode(path.resolve()))}.json"
    try:
        identity = _identity(path)
        if not again and (found := _remembered(known, identity)) is not None:
            return found
        digest, started = xxhash.xxh3_128(), time.time_ns()
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}. Restore it.") from error
    if started - max(identity[-2:]) > SETTLED_NS:
        with suppress(OSError):  # costs another reading at the next start
            make_dir(known.parent)
            write_small(known, json.dumps({"identity": identity, "xxh3_128": digest.hexdigest()}).encode())
    return digest.hexdigest()


def _identity(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def _remembered(known: Path, identity: list[int]) -> str | None:
    try:
        entry = json.loads(known.read_bytes())
        return str(entry["xxh3_128"]) if entry["identity"] == identity else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
