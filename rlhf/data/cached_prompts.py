"""Computes the cache key of a prompt set from all its inputs, and builds the set if the cache lacks it.

The cache stores the hashes of data files, and reads a file again only if the file may have changed.
"""

import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import xxhash

from rlhf.data.items import Row
from rlhf.data.prompt_cache import open_or_make
from rlhf.data.prompt_file import MappedPrompts, write_prompts
from rlhf.data.records import Source
from rlhf.data.template_date import uses_date
from rlhf.data.tokens import LengthLimit, Lengths
from rlhf.errors import UserError
from rlhf.storage.files import make_dir, write_small

CHUNK = 4 << 20
SETTLED_NS = 2_000_000_000
"""Once a file's last change is this old, another change certainly gives the file another timestamp."""
FORMAT = 4
LARGE = 1 << 20
"""Cache prompts only if their files have at least this many bytes. Tokenizing less is faster than importing Arrow."""
READERS = ("transformers", "tokenizers", "jinja2", "pyarrow")


def is_large(sources: Sequence[Source]) -> bool:
    return sum(path.stat().st_size for source in sources for path in source.files()) >= LARGE


def tokenizer_identity(tokenizer: Any, day: date) -> list[Any] | None:
    """Return everything that the tokens of a chat depend on, or None for a tokenizer written in Python.

    The code of such a tokenizer cannot be compared. `day` is the day that templates print. The result contains the day
    only if the template prints a date.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    template = json.dumps(tokenizer.chat_template, sort_keys=True)
    printed = day.isoformat() if uses_date(tokenizer.chat_template) else None
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    state = xxhash.xxh3_128_hexdigest(backend.to_str().encode())
    splits = getattr(tokenizer, "split_special_tokens", None)
    return [type(tokenizer).__name__, state, template, special, splits, printed, [version(name) for name in READERS]]


def cached_prompts(
    folder: Path,
    sources: Sequence[Source],
    rows: Callable[[], Iterable[Row]],
    tokenizer: Any,
    limit: LengthLimit,
    other_inputs: Sequence[Any],
) -> MappedPrompts:
    """Return the prompts of `sources` from the cache `folder`, or tokenize them now.

    Args:
        rows: reads the sources.
        other_inputs: all other values that the rows and their tokens depend on, as JSON values.

    Raises:
        NotPlain: a row has a value that the cache cannot store.
        UserError: the data has an error, or the folder cannot be written.
    """
    files = [path for source in sources for path in source.files()]
    hashes = [file_hash(path, folder) for path in files]
    of_sources = [[source.label, len(source.files())] for source in sources]
    parts = [FORMAT, of_sources, hashes, limit.max_prompt_length, limit.overlong, *other_inputs]
    key = xxhash.xxh3_128_hexdigest(json.dumps(parts).encode())

    def make(target: Path) -> None:
        lengths = Lengths()
        if write_prompts(target, limit.tokenized(rows(), tokenizer, lengths), lengths):
            limit.check(lengths)
        if not lengths.rows:
            raise UserError(f"{limit.setting} has no rows. Name a data set with at least one prompt.")
        if [file_hash(path, folder, again=True) for path in files] != hashes:
            raise UserError(
                f"{limit.setting}: a file changed while it was read. Start again when the file is complete."
            )

    return open_or_make(folder, key, make)


def file_hash(path: Path, folder: Path, *, again: bool = False) -> str:
    """Return the xxh3-128 of a data file in hex, from the cache `folder` or by reading the file.

    Use a cached hash only if inode, size and times are the same and the last change was well before the file was read.
    With `again`, always read the file. Raises UserError for a file that cannot be read.
    """
    entry = folder / "files" / f"{xxhash.xxh3_128_hexdigest(os.fsencode(path.resolve()))}.json"
    try:
        stat = path.stat()
        identity = [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
        if not again and (cached := _cached_hash(entry, identity)) is not None:
            return cached
        digest, started = xxhash.xxh3_128(), time.time_ns()
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}. Restore it.") from error
    if started - max(identity[-2:]) > SETTLED_NS:
        with suppress(OSError):  # if this fails, the next start reads the file again
            make_dir(entry.parent)
            write_small(entry, json.dumps({"identity": identity, "xxh3_128": digest.hexdigest()}).encode())
    return digest.hexdigest()


def _cached_hash(entry: Path, identity: list[int]) -> str | None:
    try:
        document = json.loads(entry.read_bytes())
        return str(document["xxh3_128"]) if document["identity"] == identity else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
