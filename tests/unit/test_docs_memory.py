"""docs/memory.md: its command prints what the page shows; the model has only the page's config.json."""

import re
import shlex
from pathlib import Path

import pytest

import rlhf
from rlhf.cli.plan import main

PAGE = (Path(rlhf.__file__).parents[1] / "docs/memory.md").read_text()
BLOCKS = re.findall(r"^```\w*\n(.*?)^```$", PAGE, flags=re.S | re.M)
CONFIG = next(block for block in BLOCKS if block.startswith("{"))
SHOWN = [block for block in BLOCKS if block.startswith("$ ")]
NAMED = "model.path=/models/qwen2.5-7b"


def unwrapped(text: str) -> str:
    """Join a command's wrapped lines, since their breaks depend on the length of its paths."""
    return re.sub(r" \\\n +", " ", text)


def test_there_are_commands():
    assert len(SHOWN) == 1
    assert len(BLOCKS) == len(SHOWN) + 1


@pytest.mark.parametrize("block", SHOWN)
def test_a_command_prints_what_is_shown(block, tmp_path, capsys):
    (tmp_path / "config.json").write_text(CONFIG)
    command, _, output = unwrapped(block).partition("\n")
    words = shlex.split(command.removeprefix("$ python -m rlhf.plan"))
    assert NAMED in words
    code = main([f"model.path={tmp_path}" if word == NAMED else word for word in words])
    printed = capsys.readouterr().out.replace(f"model.path={tmp_path}", NAMED)
    assert unwrapped(printed) == output
    assert code == (1 if "The run does not fit" in output else 0)
