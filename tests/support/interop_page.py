"""Commands of docs/interop.md, for the tests that run them as they stand there."""

import re
import shlex
from pathlib import Path

import rlhf

PAGE = Path(rlhf.__file__).parents[1] / "docs" / "interop.md"


def commands_of(heading: str) -> list[list[str]]:
    """Arguments of each `python -m rlhf.checkpoint` in the fenced blocks of a section."""
    lines = "".join(_blocks(heading, "")).splitlines()
    assert lines
    assert all(line.startswith("python -m rlhf.checkpoint ") for line in lines)
    return [shlex.split(line)[3:] for line in lines]


def python_of(heading: str) -> str:
    """The Python in a section."""
    return "".join(_blocks(heading, "python"))


def _blocks(heading: str, language: str) -> list[str]:
    _, section = PAGE.read_text().split(f"\n## {heading}\n")
    return re.findall(rf"^```{language}\n((?:(?!```).*\n)*?)```$", section.split("\n## ")[0], re.MULTILINE)
