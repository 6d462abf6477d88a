"""metrics.jsonl: one JSON object per step, on disk before the call returns. Every other tracker is derived from it."""

import json
from pathlib import Path
from typing import Any

from rlhf.errors import UserError
from rlhf.storage.files import append_durably, make_dir, replace_durably

Record = dict[str, Any]
"""`{"step": n, "reward/mean": 0.5, ...}`: an int and then floats or ints by metric name."""


def _line(record: Record) -> bytes:
    # json writes repr(float), which reads back as the same 64 bits; NaN and infinities become the tokens NaN, Infinity
    # and -Infinity, which Python, pandas and JavaScript's JSON5 read although strict JSON lacks them.
    return json.dumps(record).encode() + b"\n"


class History:
    """The records of one run in a file; one process writes it at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, record: Record) -> None:
        """Add one record, flushed and fsynced.

        Raises:
            TypeError: a value that JSON lacks (a tensor, say); nothing is written.
            OSError: the disk is full, or the file can't be written.
        """
        append_durably(self.path, _line(record))

    def truncate_after(self, step: int) -> None:
        """Keep the records up to and including `step`, drop the rest and a torn last line; atomic."""
        kept = [record for record in self.records() if record["step"] <= step]
        make_dir(self.path.parent)
        replace_durably(self.path, b"".join(map(_line, kept)))

    def records(self) -> list[Record]:
        """All whole records in the file's order; none if there is no file.

        Raises:
            UserError: a line before the last is no record, which no kill can cause.
        """
        try:
            *lines, _torn = self.path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
        records = []
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
                record["step"] + 0
            except (ValueError, TypeError, KeyError) as error:
                raise UserError(
                    f"{self.path}: line {number} is damaged ({line[:80]!r}); remove it or restore the file from a copy"
                ) from error
            records.append(record)
        return records
