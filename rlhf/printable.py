"""Prepares text for a terminal: escapes control characters, wraps, aligns tables. Imports nothing of the package."""

import os
import re
import sys
import textwrap
from collections.abc import Sequence
from typing import TextIO

_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
WIDTH = 80
"""Columns of tables and of wrapped texts."""
_ERROR = re.compile(r"^((?:[0-9:]+ [a-z0-9 ]+: )?)(error:)")


def printable(text: str) -> str:
    """Return `text`, a single line, with unprintable characters escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def printable_lines(text: str) -> str:
    """Return `text` with `printable` applied to each line."""
    return "\n".join(printable(line) for line in text.split("\n"))


def printable_output(text: str) -> str:
    """Return a program's output without colours, with tabs expanded and `printable` applied to each line."""
    return printable_lines(_COLOUR.sub("", text.replace("\r\n", "\n")).expandtabs())


def with_colour(text: str, stream: TextIO) -> str:
    """Return `text` with its leading "error:" in red if `stream` is a terminal with colours."""
    if stream.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR"):
        return _ERROR.sub("\\1\x1b[1;31m\\2\x1b[0m", text)
    return text


def write_error(message: str) -> None:
    """Write `message` to stderr as an error; on a terminal, in red after an empty line."""
    before = "\n" if sys.stderr.isatty() else ""
    sys.stderr.write(f"{before}{with_colour(f'error: {printable_output(message)}', sys.stderr)}\n")


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows with aligned columns, in lines of at most WIDTH characters. The first row has the headings.

    The first column wraps between words; a word that is too long is shortened in the middle. Columns that do
    not fit follow below, next to a repeated first column.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left_over = WIDTH - sum(width + 2 for width in widths[1:])
    room = left_over if left_over >= WIDTH // 4 else WIDTH // 2
    first = [wrapped(row[0], room, indent="  ") for row in rows]
    left = max(len(line) for lines in first for line in lines)
    blocks: list[list[int]] = []
    used = WIDTH
    for column, width in enumerate(widths[1:], start=1):
        if used + 2 + width > WIDTH:
            blocks.append([])
            used = left
        blocks[-1].append(column)
        used += 2 + width
    texts = []
    for columns in blocks:
        text = []
        for row, lines in zip(rows, first, strict=True):
            cells = "".join(f"  {row[column]:>{widths[column]}}" for column in columns)
            text += [f"{lines[0]:<{left}}{cells}", *lines[1:]]
        texts.append("\n".join(text))
    return "\n\n".join(texts)


def wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """Return the lines of `text`, broken between words, with `indent` before all lines but the first.

    A word that is too long is shortened in the middle.
    """
    words = text.split()
    for i, word in enumerate(words):
        room = width - len(indent) if i else width
        words[i] = word if len(word) <= room else f"{word[: room // 3]}…{word[room // 3 + 1 - room :]}"
    return textwrap.wrap(
        " ".join(words), width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    ) or [""]
