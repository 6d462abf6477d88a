"""Commands of docs/interop.md, for the tests that run them as they stand there."""

import re
import shlex
from pathlib import Path

import rlhf

PAGE = Path(rlhf.__file__).parents[1] / "docs" / "interop.md"


def commands_of(heading: str) -> list[list[str]]:
    """Arguments of each `python -m rlhf.checkpoint` in the fenced blocks of a section."""
    _, section = PAGE.read_text().split(f"\n## {heading}\n")
    blocks = re.findall(r"^```\n(.*?)^```$", section.split("\n## ")[0], re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).splitlines()
    assert lines
    assert all(line.startswith("python -m rlhf.checkpoint ") for line in lines)
    return [shlex.split(line)[3:] for line in lines]
