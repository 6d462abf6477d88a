"""metrics.jsonl: one JSON object per step, on disk before the call returns. Every other tracker is derived from it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlhf.errors import UserError
from rlhf.storage.files import append_durably, make_dir, truncate
from rlhf.storage.history_file import DamagedHistory, HistoryMark, end_of_step, lines, parsed

Record = dict[str, Any]
"""`{"step": n, "reward/mean": 0.5, ...}`: an int and then floats or ints by metric name."""
OF_THE_MACHINE = ("perf/", "timing_s/")
"""Beginnings of the metrics that depend on the clock or the machine; all others are equal in runs that are equal bit
for bit."""


def _line(record: Record) -> bytes:
    # json writes repr(float), which reads back as the same 64 bits; NaN and infinities become the tokens NaN, Infinity
    # and -Infinity, which Python, pandas and JavaScript's JSON5 read although strict JSON lacks them.
    return json.dumps(record).encode() + b"\n"


class History:
    """The records of one run in a file; one process writes it at a time. Nothing reads more than a line at once."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, record: Record) -> None:
        """Add one record, flushed and fsynced.

        Raises:
            TypeError: a value that JSON lacks (a tensor, say); nothing is written.
            OSError: the disk is full, or the file can't be written.
        """
        append_durably(self.path, [_line(record)])

    def mark(self) -> HistoryMark:
        """The present end, for a checkpoint."""
        return HistoryMark.at_end(self.path)

    def has(self, mark: HistoryMark) -> bool:
        """Whether all that was there when `mark` was taken still is."""
        return mark.fits(self.path)

    def cut_after(self, step: int, mark: HistoryMark | None = None) -> None:
        """Drop the records after `step`, and a torn last line.

        Args:
            mark: the end of the history when `step` was saved. Where it fits, nothing before it is read.

        Raises:
            UserError: there is no `mark` that fits, and a line up to there is no record.
        """
        make_dir(self.path.parent)
        with _told():
            # Promise 17.
            size = end_of_step(self.path, step, mark)
        # Not synced: records that a power cut brings back are cut off again by the resume after it.
        if self.path.exists() and self.path.stat().st_size > size:
            truncate(self.path, size)

    def steps(self) -> Iterator[int]:
        """The steps of all whole records, in the file's order; none if there is no file."""
        with _told():
            for step, _ in lines(self.path):
                yield step

    def records(self, first: int = 0) -> Iterator[Record]:
        """The whole records from the step `first` on, in the file's order; none if there is no file.

        Raises:
            UserError: a line before the last is no record, which no kill can cause.
        """
        with _told():
            for number, (step, line) in enumerate(lines(self.path), start=1):
                if step >= first:
                    yield parsed(self.path, number, line)


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except DamagedHistory as error:
        raise UserError(f"{error}; remove it or restore the file from a copy") from error
