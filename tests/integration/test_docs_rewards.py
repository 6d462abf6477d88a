"""The files and commands of docs/data-and-rewards.md start, train, and learn where the page says so. A run with every
convention of reward functions resumes to the same bits."""

import json
import re
import shlex
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf.api import check_inputs
from rlhf.compose import compose_config
from rlhf.config.library import Library
from rlhf.config.rules.validate import validate
from rlhf.errors import EXIT_DONE
from tests.support.compare_runs import differences
from tests.support.launching import ROOT, ranks, records

PAGE = (ROOT / "docs" / "data-and-rewards.md").read_text()
BLOCKS = re.findall(r"<!-- (file|command): ([^\n]*?) -->\n```\w*\n(.*?)```\n", PAGE, flags=re.DOTALL)
FILES = {name: text for kind, name, text in BLOCKS if kind == "file"}
COMMANDS = {
    (re.findall(r"trainer.experiment_name=(\w+)", text) or ["minimal"])[0]: (
        mark,
        shlex.split(text.replace("\\\n", ""))[3:],
    )
    for kind, mark, text in BLOCKS
    if kind == "command"
}
SHORT = ("trainer.total_training_steps=2",)
QUIET = ("trainer.device=cpu", "trainer.threads_per_rank=1", "trainer.save_freq=1", "trainer.log_rollouts=-1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The page's files."""
    folder = tmp_path_factory.mktemp("page")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


def run(folder: Path, name: str, *more: str) -> Path:
    """Run a command of the page in `folder` to its end, and return the run directory."""
    mark, arguments = COMMANDS[name]
    # Paths must be absolute, because the ranks are forked from a server in another working directory.
    inside = [re.sub(rf"\b({'|'.join(map(re.escape, FILES))}|judge)\b", rf"{folder}/\1", each) for each in arguments]
    local = [f"trainer.default_local_dir={folder}/checkpoints", *QUIET, *(SHORT if mark == "two steps" else ())]
    end = ranks(folder / f"{name}.log", [*inside, *local, *more])
    assert end.code == EXIT_DONE, end.output
    return folder / "checkpoints" / "rlhf" / name


def samples(run_dir: Path, step: int) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "samples" / f"step_{step}.jsonl").read_text().splitlines()]


def test_every_command_of_the_page_is_right(folder, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "judge").mkdir()
    (folder / "judge" / "config.json").write_text('{"model_type": "llama", "id2label": {"0": "LABEL_0"}}')
    (folder / "judge" / "tokenizer.json").write_text('{"model": {}}')  # the checks before a start read no more of it
    (folder / "judge" / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    assert COMMANDS.keys() == {*("first_prompts", "own_rows", "minimal", "conventions", "three_rewards", "judged")}
    assert PAGE.count("python -m rlhf.train ") == len(COMMANDS)
    for _, arguments in COMMANDS.values():
        config = compose_config(arguments, Library.find(None))
        validate(config, {})
        check_inputs(config)
    shutil.rmtree(folder / "judge")


def test_functions_of_every_convention_train_together(folder):
    run_dir = run(folder, "conventions")
    _, last = (record for record in records(run_dir) if record["step"])
    for name in ("compute_score", "shorter", "judged", "alone", "characters"):
        assert f"reward/{name}" in last
    assert not any("opinion" in name for name in last)
    for sample in samples(run_dir, 2):
        text, question = sample["response"].replace("<|end|>", ""), sample["prompt"].partition("What is")[2][:9]
        assert sample["extra"]["opinion"] == f"{text!r} to 'What is{question}'"
        assert sample["rewards"]["judged"] in (0.0, 0.1)
    assert len(samples(run_dir, 2)) == 16


@pytest.mark.slow
def test_a_resume_gives_batched_and_async_functions_the_same(folder, tmp_path):
    whole = tmp_path / "whole"
    shutil.copytree(run(folder, "conventions"), whole)
    run_dir = folder / "checkpoints" / "rlhf" / "conventions"
    shutil.rmtree(run_dir / "global_step_2")
    run(folder, "conventions")
    assert differences(whole, run_dir) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("conventions", "minimal")])
def test_the_other_commands_train(folder, name):
    if name == "judged":
        subprocess.run([sys.executable, "make_judge.py"], cwd=folder, env={"PYTHONPATH": str(ROOT)}, check=True)
    assert len([record for record in records(run(folder, name)) if record["step"]]) == 2


@pytest.mark.slow
def test_the_complete_example_learns(folder):
    rewards = [record["reward/mean"] for record in records(run(folder, "minimal", "trainer.save_freq=0"))]
    assert statistics.fmean(rewards[:5]) < 0.05
    assert statistics.fmean(rewards[-5:]) > 0.2
