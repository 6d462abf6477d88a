"""Writes and reads metrics.jsonl, one JSON object per step. All other trackers derive from metrics.jsonl."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlhf.errors import UserError
from rlhf.storage.files import append_durably, make_dir, truncate
from rlhf.storage.history_file import DamagedHistory, HistoryMark, end_of_step, parse_record, read_lines

Record = dict[str, Any]
"""`{"step": n, "reward/mean": 0.5, ...}`: an int, then floats or ints by metric name."""
MACHINE_METRICS = ("perf/", "timing_s/")
"""Prefixes of metrics that depend on the clock or the machine. All other metrics are bit-identical in equal runs."""


class History:
    """Stores the records of a run in a file, read line by line. One process writes the file at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, record: Record) -> None:
        """Append one record and fsync the file.

        Raises:
            TypeError: JSON has no type for a value, for example a tensor. The file is unchanged.
            OSError: the disk is full, or the file can't be written.
        """
        # json writes repr(float), which round-trips all 64 bits. NaN and infinities become NaN, Infinity and -Infinity,
        # which strict JSON lacks but Python, pandas and JSON5 read.
        append_durably(self.path, [json.dumps(record).encode() + b"\n"])

    def cut_after(self, step: int, mark: HistoryMark | None = None) -> None:
        """Drop the records after `step`, and a torn last line.

        `mark` is the end of the history when `step` was saved. If `mark` fits, the records before it are not read.

        Raises:
            UserError: without a fitting `mark`, a line up to `step` is not a record.
        """
        make_dir(self.path.parent)
        with _damage_as_user_error():
            # Promise 17.
            size = end_of_step(self.path, step, mark)
        # Do not sync: if a power cut restores dropped records, the next resume drops them again.
        if self.path.exists() and self.path.stat().st_size > size:
            truncate(self.path, size)

    def steps(self) -> Iterator[int]:
        """Yield the steps of all complete records, in the file's order."""
        with _damage_as_user_error():
            for step, _ in read_lines(self.path):
                yield step

    def records(self, first: int = 0) -> Iterator[Record]:
        """Yield the complete records from the step `first` on, in the file's order.

        Raises:
            UserError: a complete line is not a record. No kill causes this damage.
        """
        with _damage_as_user_error():
            for number, (step, line) in enumerate(read_lines(self.path), start=1):
                if step >= first:
                    yield parse_record(self.path, number, line)


@contextmanager
def _damage_as_user_error() -> Iterator[None]:
    try:
        yield
    except DamagedHistory as error:
        raise UserError(f"{error}. Remove the line, or restore the file from a copy.") from error
