"""Reads the metric history: one line of JSON per step, in the order of steps. Readers need memory for one line only."""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

# Bytes to hash: enough to contain a whole record. Records contain times, so they differ between runs and attempts.
TAIL = 4096
_STEP_FIRST = re.compile(rb'\{"step": (\d+)[,}]')


class DamagedHistory(Exception):
    """A line is not a record. No kill causes this damage. The message names file and line."""


@dataclass(frozen=True)
class HistoryMark:
    """Marks the position after `size` bytes of the history. `tail`: xxh3-128 in hex of the TAIL bytes before it."""

    size: int
    tail: str

    @classmethod
    def parse(cls, mark: object) -> "HistoryMark":
        """Return the mark that a checkpoint stores as a JSON object. Raise ValueError for other content."""
        if not isinstance(mark, dict) or mark.keys() != {"size", "tail"}:
            raise ValueError("the mark of the metric history is not an object with size and tail")
        size, tail = mark["size"], mark["tail"]
        if type(size) is not int or size < 0 or not isinstance(tail, str):
            raise ValueError("the mark of the metric history has a wrong size or tail")
        return cls(size, tail)

    @classmethod
    def at_end(cls, path: Path) -> "HistoryMark":
        """Return the mark of the end of the file, or of the beginning of a missing file."""
        size = path.stat().st_size if path.exists() else 0
        return cls(size, _tail(path, size) or "")

    def fits(self, path: Path) -> bool:
        """Return whether the TAIL bytes of the file before this mark have the hash `tail`."""
        return (_tail(path, self.size) or "") == self.tail


def _tail(path: Path, size: int) -> str | None:
    """Return the hash of the TAIL bytes before offset `size`; None when the file is shorter or `size` is 0."""
    if not size or not path.exists():
        return None
    with path.open("rb") as file:
        length = min(size, TAIL)
        content = os.pread(file.fileno(), length, size - length)
    return xxhash.xxh3_128_hexdigest(content) if len(content) == length else None


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield each whole line with its step; raise DamagedHistory for a line without a step. Skips a torn last line."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            match = _STEP_FIRST.match(line)
            yield int(match[1]) if match else int(parse_record(path, number, line)["step"]), line


def parse_record(path: Path, number: int, line: bytes) -> dict[str, float]:
    """Parse the record of a line; raises DamagedHistory when the line is not a record."""
    try:
        record = json.loads(line)
        record["step"] + 0
    except (ValueError, TypeError, KeyError) as error:
        raise DamagedHistory(f"{path}: line {number} is damaged ({line[:80]!r})") from error
    return record


def end_of_step(path: Path, step: int, mark: HistoryMark | None) -> int:
    """Return the number of bytes of the records up to `step`. If `mark`, which was saved at `step`, fits
    the file, read no records. Otherwise read them, and raise DamagedHistory for a line without a step."""
    if mark is not None and mark.fits(path):
        return mark.size
    size = 0
    for number, line in read_lines(path):
        if number > step:
            break
        size += len(line)
    return size
