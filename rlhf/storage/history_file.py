"""Metric history as a file that grows at its end: one line of JSON per step, in the order of the steps.

Whatever reads it holds one line at a time, however long the run becomes.
"""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

# Of a record, and enough of one that no other run or attempt has written the same: times stand in it.
TAIL = 4096
_STEP_FIRST = re.compile(rb'\{"step": (\d+)[,}]')


class DamagedHistory(Exception):
    """A line that is no record, which no kill can cause; the text names file and line."""


@dataclass(frozen=True)
class HistoryMark:
    """A place in the history: its bytes up to there, and the xxh3-128 in hex of the last TAIL of them, by which the
    same beginning is known again."""

    size: int
    tail: str

    @classmethod
    def at_end(cls, path: Path) -> "HistoryMark":
        """The end of the file, or the beginning of one that is not there."""
        size = path.stat().st_size if path.exists() else 0
        return cls(size, _tail(path, size) or "")

    def fits(self, path: Path) -> bool:
        """Whether the file has this place."""
        return (_tail(path, self.size) or "") == self.tail


def _tail(path: Path, size: int) -> str | None:
    """The hash of the last TAIL of the first `size` bytes; None when there are not so many, or none at all."""
    if not size or not path.exists():
        return None
    with path.open("rb") as file:
        length = min(size, TAIL)
        content = os.pread(file.fileno(), length, size - length)
    return xxhash.xxh3_128_hexdigest(content) if len(content) == length else None


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Each whole line with its step; none if there is no file. A torn last line is left out.

    Raises DamagedHistory for a line that has no step.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            match = _STEP_FIRST.match(line)
            yield int(match[1]) if match else int(parsed(path, number, line)["step"]), line


def parsed(path: Path, number: int, line: bytes) -> dict[str, float]:
    """The record of a line; raises DamagedHistory when it is none."""
    try:
        record = json.loads(line)
        record["step"] + 0
    except (ValueError, TypeError, KeyError) as error:
        raise DamagedHistory(f"{path}: line {number} is damaged ({line[:80]!r})") from error
    return record


def end_of_step(path: Path, step: int, mark: HistoryMark | None) -> int:
    """Bytes of the records up to and including `step`: at once when the file has the place `mark` of a checkpoint of
    that step, else by reading the lines.

    Raises DamagedHistory.
    """
    if mark is not None and mark.fits(path):
        return mark.size
    size = 0
    for number, line in lines(path):
        if number > step:
            break
        size += len(line)
    return size
