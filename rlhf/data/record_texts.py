"""Reads records from JSONL, JSON and CSV files in UTF-8, with or without a byte-order mark."""

import csv
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlhf.errors import UserError

Record = tuple[str, dict[str, Any]]
"""The location of the record, for messages, and its columns."""
ENCODING = "utf-8-sig"
BROKEN = (ValueError, RecursionError)
"""Errors of `json.loads`: invalid JSON, a number that is too long, lists that are nested too deeply."""


def jsonl_records(setting: str, path: Path) -> Iterator[Record]:
    """Yield the object on each line that is not empty. Raise UserError, with the line number, for invalid JSON."""
    number = 0
    with _reading(setting, path, lambda: number), path.open(encoding=ENCODING) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{setting}: {path} line {number}"
            try:
                record = json.loads(line)
            except BROKEN as error:
                raise UserError(f"{where} is not JSON: {error}. Correct or delete the line.") from error
            yield where, _checked(record, where)


def json_records(setting: str, path: Path) -> Iterator[Record]:
    """Yield the objects of a JSON list, or of the lines of any other file. Raise UserError with the location."""
    with _reading(setting, path, lambda: 0):
        text = path.read_text(encoding=ENCODING)
    if not text.lstrip().startswith("["):
        yield from _lines_or_error(setting, path, text)
        return
    try:
        records = json.loads(text)
    except BROKEN as error:
        raise UserError(f"{setting}: {path} is not JSON: {error}. Correct it.") from error
    for number, record in enumerate(records):
        where = f"{setting}: {path} entry {number}"
        yield where, _checked(record, where)


def csv_records(setting: str, path: Path) -> Iterator[Record]:
    """Yield the rows below the header. Values are strings, or None if empty. Raises UserError with the line number."""
    number = 0
    csv.field_size_limit(sys.maxsize)
    with _reading(setting, path, lambda: number), path.open(encoding=ENCODING, newline="") as file:
        rows = csv.reader(file, strict=True)
        names = next(rows, [])
        if len(names) == 1 and (others := [mark for mark in ";\t|" if mark in names[0]]):
            raise UserError(f"{setting}: {path}: columns are separated by {others[0]!r}. Write the file with commas.")
        if twice := [name for name in names if names.count(name) > 1]:
            raise UserError(f"{setting}: {path}: two columns are called {twice[0]!r}. Rename one.")
        try:
            for row in rows:
                number = rows.line_num
                where = f"{setting}: {path} line {number}"
                if row and len(row) != len(names):
                    raise UserError(
                        f"{where} has {len(row)} values for {len(names)} columns ({', '.join(names)}). Put texts with "
                        "commas or line breaks in quotes."
                    )
                if row:
                    yield where, {name: value or None for name, value in zip(names, row, strict=True)}
        except csv.Error as error:
            raise UserError(f"{setting}: {path} line {rows.line_num} is not CSV: {error}. Correct it.") from error


def _checked(record: Any, where: str) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise UserError(f"{where} is not a JSON object but {type(record).__name__}. Correct or delete this record.")
    return record


def _lines_or_error(setting: str, path: Path, text: str) -> Iterator[Record]:
    try:
        whole = json.loads(text)
    except BROKEN:
        yield from jsonl_records(setting, path)
        return
    if isinstance(whole, dict) and len(text.strip().splitlines()) == 1:
        yield f"{setting}: {path} line 1", whole
        return
    keys = f" with {', '.join(whole)}" if isinstance(whole, dict) else ""
    raise UserError(
        f"{setting}: {path} contains one {type(whole).__name__}{keys}, not a list of rows. Write the rows as a list, "
        "or one on each line (.jsonl)."
    )


@contextmanager
def _reading(setting: str, path: Path, line: Any) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        if (other := extension_by_content(path)) not in (None, ".jsonl"):
            raise UserError(f"{setting}: {path} is a {other} file, not text. Rename or unpack it.") from error
        where = f"{setting}: {path} line {_first_line_not_utf8(path)}"
        raise UserError(
            f"{where} is not UTF-8 ({error.reason}). Convert the file, as in `iconv -f latin1 -t UTF-8 OLD > NEW` "
            "(replace latin1 by the file's encoding)."
        ) from error
    except OSError as error:
        raise UserError(f"{setting}: {path} cannot be read after line {line()}: {error}. Restore it.") from error


def extension_by_content(path: Path) -> str | None:
    """Return the file extension that the first bytes of the file indicate, or None."""
    with path.open("rb") as file:
        start = file.read(6)
    forms = {
        b"PAR1": ".parquet",
        b"\x1f\x8b": ".gz",
        b"PK\x03\x04": ".zip",
        b"\x28\xb5\x2f\xfd": ".zst",
        b"{": ".jsonl",
    }
    return next((form for magic, form in forms.items() if start.startswith(magic)), None)


def _first_line_not_utf8(path: Path) -> int:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
    return 1
