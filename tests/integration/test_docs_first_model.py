"""docs/first-model.md: its files rehearse and export a run, and its other commands are valid."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf.compose import compose_config
from rlhf.config.library import Library
from rlhf.config.rules.validate import validate
from rlhf.models.tiny import FOLDER
from tests.support.launching import ROOT

PAGE = (ROOT / "docs" / "first-model.md").read_text()
BLOCKS = re.findall(r"<!-- (file|command): ([^\n]*?) -->\n```\w*\n(.*?)```\n", PAGE, flags=re.DOTALL)
COMMANDS = {name: shlex.split(text.replace("\\\n", ""))[1:] for kind, name, text in BLOCKS if kind == "command"}
SHORT = ["trainer.device=cpu", "trainer.threads_per_rank=1", "trainer.nproc=1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The page's files, and a local model in place of the one on the Hub."""
    folder = tmp_path_factory.mktemp("page")
    for kind, name, text in BLOCKS:
        if kind == "file":
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    (folder / "Qwen").mkdir()
    (folder / "Qwen" / "Qwen2.5-0.5B-Instruct").symlink_to(FOLDER)
    return folder


def run(folder: Path, arguments: list[str]) -> str:
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, stdout=subprocess.PIPE, text=True, check=True, timeout=300
    ).stdout


def test_the_rehearsal_trains_and_its_model_is_exported(folder):
    run(folder, [*COMMANDS["rehearsal"], *SHORT])
    export = [word.replace("/mine", "/rehearsal") for word in COMMANDS["export"]]
    run(folder, export)
    assert (folder / "my_model" / "model.safetensors").is_file()


def test_the_plan_counts_the_run(folder):
    assert "Settings that lower the peak" in run(folder, COMMANDS["plan"])


def test_the_training_command_is_valid(folder, monkeypatch):
    monkeypatch.chdir(folder)
    arguments = COMMANDS["train"]
    at = arguments.index("--config-dir")
    config = compose_config([*arguments[at + 2 :], "trainer.device=cpu"], Library.find(Path(arguments[at + 1])))
    validate(config)
    assert config.trainer.experiment_name == "mine"
    assert config.reward.functions == ["rewards.py:last_number"]
