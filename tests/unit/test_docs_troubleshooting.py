"""docs/troubleshooting.md: the messages that it explains are in the code, and its settings exist."""

import ast
import re
from pathlib import Path

import pytest

import rlhf
from rlhf.config.known_settings import SECTIONS, SETTINGS

ROOT = Path(rlhf.__file__).parents[1]
PAGE = " ".join((ROOT / "docs/troubleshooting.md").read_text().split())
MESSAGES = re.findall(r"\*\*`([^`]+)`\*\*", PAGE)
OF_OTHERS = {"CUDA out of memory"}


@pytest.fixture(scope="module")
def texts() -> str:
    """Return all string literals of the package, with a line break in place of each formatted value."""
    found = []
    for path in (ROOT / "rlhf").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(v.value if isinstance(v, ast.Constant) else "\n" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%[sdg]|%\.\w+", "\n", node.value))
    return "\n\n".join(found)


@pytest.mark.parametrize("message", [message for message in MESSAGES if message not in OF_OTHERS])
def test_a_message_stands_in_the_code(message: str, texts: str) -> None:
    fixed = [part.strip() for part in message.split("...") if len(part.strip()) > 3]
    assert fixed
    assert [part for part in fixed if part not in texts] == []


def test_settings_are_there() -> None:
    named = set(re.findall(r"`((?:\w+\.)+\w+)(?:=[^`]*)?`", PAGE))
    settings = {name for name in named if name.partition(".")[0] in SECTIONS}
    assert len(settings) > 10
    assert settings <= SETTINGS.keys()
