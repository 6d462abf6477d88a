"""Extracts the commands of docs/interop.md for the tests that run them."""

import re
import shlex
from pathlib import Path

import rlhf

PAGE = Path(rlhf.__file__).parents[1] / "docs" / "interop.md"


def commands_of(heading: str) -> list[list[str]]:
    """Return the arguments of each `python -m rlhf.checkpoint` in a section's fenced blocks."""
    return _arguments(heading, "rlhf.checkpoint")


def training_of(heading: str) -> list[list[str]]:
    """Return the arguments of each `python -m rlhf.train` in a section's fenced blocks."""
    return _arguments(heading, "rlhf.train")


def _arguments(heading: str, module: str) -> list[list[str]]:
    lines = [shlex.split(line) for line in "".join(_blocks(heading, "")).splitlines()]
    assert all(line[:2] == ["python", "-m"] and line[2] in ("rlhf.checkpoint", "rlhf.train") for line in lines)
    found = [line[3:] for line in lines if line[2] == module]
    assert found
    return found


def python_of(heading: str) -> str:
    """Return a section's Python code."""
    return "".join(_blocks(heading, "python"))


def _blocks(heading: str, language: str) -> list[str]:
    _, section = PAGE.read_text().split(f"\n## {heading}\n")
    return re.findall(rf"^```{language}\n((?:(?!```).*\n)*?)```$", section.split("\n## ")[0], re.MULTILINE)
