"""Every promise of docs/design/checkpoint-protocol.md is cited by code that keeps it and by a test that checks it."""

import re
from pathlib import Path

import pytest

from tests.support.launching import ROOT


def promised() -> list[int]:
    """The numbers of the list, in its order."""
    _, _, rest = (ROOT / "docs/design/checkpoint-protocol.md").read_text().partition("## Promises\n")
    section, _, _ = rest.partition("\n## ")
    return [int(number) for number in re.findall(r"^(\d+)\. \*\*", section, re.MULTILINE)]


def cited(folder: str) -> dict[int, list[str]]:
    """The files that cite each number."""
    found: dict[int, list[str]] = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        if path != Path(__file__):
            for number in re.findall(r"\bpromise (\d+)\b", path.read_text(), re.IGNORECASE):
                found.setdefault(int(number), []).append(str(path.relative_to(ROOT)))
    return found


def test_the_list_is_numbered_without_gaps():
    assert promised() == list(range(1, len(promised()) + 1))
    assert promised()


@pytest.mark.parametrize("folder", ["rlhf", "tests"])
def test_every_promise_is_cited_and_nothing_else(folder):
    assert sorted(cited(folder)) == promised()
