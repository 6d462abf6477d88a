"""Texts of other people's made harmless for a terminal. Imports nothing of the package."""

import re

_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")


def printable(text: str) -> str:
    """One line of `text` without effect on a terminal: what is no printable character is written as an escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def printable_lines(text: str) -> str:
    """The same of each line."""
    return "\n".join(printable(line) for line in text.split("\n"))


def printable_output(text: str) -> str:
    """The same of what a program says to people: colours are left out, and tabs become blanks."""
    return printable_lines(_COLOUR.sub("", text.replace("\r\n", "\n")).expandtabs())
