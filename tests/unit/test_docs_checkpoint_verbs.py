"""Commands of docs/checkpoints.md that inspect or prune checkpoints: each is run as written on the page."""

import re
import shlex
from pathlib import Path

import fsspec
import pytest

import rlhf
from rlhf.checkpoint.__main__ import main
from tests.support.checkpoints import PlainRole, make_config, save_steps
from tests.support.published import steps

PAGE = Path(rlhf.__file__).parents[1] / "docs/checkpoints.md"
VERBS = "list|inspect|verify|prune"
COMMANDS = re.findall(rf"^python -m rlhf\.checkpoint ((?:{VERBS}) .+)$", PAGE.read_text(), re.MULTILINE)
RUN = Path("checkpoints/rlhf/offline")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    config = make_config(tmp_path_factory.mktemp("saved") / "checkpoints")
    config.trainer.experiment_name = "offline"
    config.checkpoint.max_to_keep = None
    save_steps(config, PlainRole(), 20, 40, 60, 80)
    return config.run_dir


@pytest.mark.parametrize("command", COMMANDS)
def test_it_does_what_its_remark_says(run_dir, tmp_path, monkeypatch, command, capsys):
    monkeypatch.chdir(tmp_path)
    fsspec.filesystem("file").put(str(run_dir), "checkpoints/rlhf/offline", recursive=True)
    (RUN / "global_step_10.damaged-1").mkdir()
    Path("folder/rlhf").mkdir(parents=True)
    Path("folder/rlhf/offline").symlink_to(RUN.absolute())
    # Tests have no bucket, so a local folder replaces it.
    arguments = shlex.split(command.replace("s3://bucket/", f"file://{tmp_path}/"), comments=True)
    rules = ["--max-to-keep", "2"] if arguments[0] == "prune" and "--max-to-keep" not in arguments else []
    assert main([*arguments, *rules]) == 0
    output = capsys.readouterr().out
    left = [60, 80] if "--yes" in arguments else [20, 40, 60, 80]
    assert steps(RUN) == left
    assert (RUN / "global_step_10.damaged-1").is_dir() == ("--set-aside" not in arguments)
    shown = {"list": "committed", "inspect": "driver state", "verify": "intact", "prune": "global_step_20"}
    assert shown[arguments[0]] in output


def test_every_verb_that_loads_no_torch_is_there():
    assert {command.split()[0] for command in COMMANDS} == set(VERBS.split("|"))
