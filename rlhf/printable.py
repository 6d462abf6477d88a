"""Escapes control characters in text from outside before it reaches a terminal. Imports nothing of the package."""

import os
import re
import sys
from typing import TextIO

_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
_ERROR = re.compile(r"^((?:[0-9:]+ [a-z0-9 ]+: )?)(error:)")


def printable(text: str) -> str:
    """Return `text`, a single line, with unprintable characters escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def printable_lines(text: str) -> str:
    """Return `text` with each line `printable`."""
    return "\n".join(printable(line) for line in text.split("\n"))


def printable_output(text: str) -> str:
    """Return a program's output with each line `printable`, colours removed and tabs expanded."""
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
