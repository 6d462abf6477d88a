"""Trainer commands on pages without a test of their own: each command is valid, and its answer is as shown."""

import re
import shlex
from contextlib import nullcontext
from pathlib import Path

import pytest

import rlhf
from rlhf.cli.arguments import parse
from rlhf.cli.sweep import plan
from rlhf.compose import compose_config
from rlhf.config.library import Library
from rlhf.config.rules.validate import validate
from rlhf.config.vllm_versions import installation_problem
from rlhf.errors import EXIT_USER_ERROR, UserError
from rlhf.models.tiny import FOLDER
from rlhf.train import main

ROOT = Path(rlhf.__file__).parents[1]
PAGES = ["README.md", *(f"docs/{name}.md" for name in ("checkpoints", "configuration", "fault-tolerance", "rollout"))]
OF_THE_READER = {
    "model.path=...": f"model.path={FOLDER}",
    "model.path=/models/mine": f"model.path={FOLDER}",
    "data.train_files=...": "data.train_files=train.jsonl",
}
PAGES += ["docs/algorithms.md", "docs/lora.md", "docs/tracking.md", "docker/README.md"]


def blocks(page: str) -> list[str]:
    return re.findall(r"^```\w*\n(.*?)^```$", (ROOT / page).read_text(), flags=re.S | re.M)


def commands() -> list[tuple[str, list[str]]]:
    """Return page and arguments of each `-m rlhf.train`, with placeholders for the reader's settings replaced."""
    found = []
    for page in PAGES:
        for block in blocks(page):
            for line in block.replace("\\\n", " ").splitlines():
                if line.startswith("$ ") or "-m rlhf.train" not in line:
                    continue
                words = shlex.split(line.partition("-m rlhf.train")[2], comments=True)
                found.append((page, [OF_THE_READER.get(word, word) for word in words if word != "..."]))
    return found


def test_there_are_commands():
    assert len(commands()) > 20


@pytest.mark.parametrize(("page", "arguments"), commands(), ids=lambda value: value if isinstance(value, str) else "")
def test_a_command_is_valid(page, arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text("def score(solution_str):\n    return 0.0\n")
    if "--config-dir" in arguments:
        pytest.skip("its recipe stands on the page: tests/integration/test_docs_algorithms.py")
    parsed = parse(arguments)
    library = Library.find(None)
    text = " ".join(arguments)
    missing = installation_problem() if "rollout=vllm" in text and "servers.urls" not in text else None
    with nullcontext() if missing is None else pytest.raises(UserError, match="vLLM is not installed"):
        if parsed.multirun:
            assert len(plan(parsed.overrides, library)) > 1
        else:
            validate(compose_config(parsed.overrides, library))


@pytest.mark.parametrize("page", [page for page in PAGES if any(block.startswith("$ ") for block in blocks(page))])
def test_a_mistake_is_answered_as_shown(page, capsys):
    for block in blocks(page):
        for shown in re.findall(r"^\$ python -m rlhf\.train (.*)\n((?:(?!\$ ).*\n)*)", block, flags=re.M):
            assert main(shlex.split(shown[0])) == EXIT_USER_ERROR
            assert capsys.readouterr().err == shown[1]
