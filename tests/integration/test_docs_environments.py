"""The files and commands of docs/environments.md: each environment of the page trains, and resumes after a kill."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from rlhf.errors import EXIT_DONE
from tests.support.compare_runs import differences
from tests.support.launching import ROOT, ranks, records

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs" / "environments.md").read_text()
BLOCKS = re.findall(r"<!-- (file|command): ([^\n]*?) -->\n```\w*\n(.*?)```\n", PAGE, flags=re.DOTALL)
FILES = {name: text for kind, name, text in BLOCKS if kind == "file"}
(COMMAND,) = [shlex.split(text.replace("\\\n", ""))[3:] for kind, _, text in BLOCKS if kind == "command"]
QUIET = ("trainer.device=cpu", "trainer.total_training_steps=2", "trainer.save_freq=1", "trainer.log_rollouts=-1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The page's files."""
    folder = tmp_path_factory.mktemp("page")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


def run(folder: Path, name: str, *more: str) -> Path:
    """Run the page's command in `folder` to the end of its two steps, and return the run directory."""
    end = ranks(folder / f"{name}.log", [*COMMAND, f"trainer.experiment_name={name}", *QUIET, *more], folder=folder)
    assert end.code == EXIT_DONE, end.output
    return folder / "checkpoints" / "rlhf" / name


def samples(run_dir: Path, step: int) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "samples" / f"step_{step}.jsonl").read_text().splitlines()]


def test_this_file_runs_every_block_of_the_page():
    assert FILES.keys() == {"shop.py", "shop.jsonl", "echo.py"}
    assert PAGE.count("```") == 2 * (len(FILES) + 1)


def test_the_shop_trains_and_resumes_to_the_same_bits(folder, tmp_path):
    run_dir = run(folder, "shop")
    assert [record["step"] for record in records(run_dir)] == [0, 1, 2] or [r["step"] for r in records(run_dir)] == [1, 2]
    sample = samples(run_dir, 1)[0]
    whole = tmp_path / "whole"
    shutil.copytree(run_dir, whole)
    shutil.rmtree(run_dir / "global_step_2")
    run(folder, "shop")
    assert differences(whole, run_dir) == []
    print(sample, records(run_dir)[-1])


def test_the_shop_sells(folder):
    """The page's claims about calls: an answer, a rejected call, the reward."""


def test_the_echo_trains_on_free_text(folder):
    run_dir = run(folder, "echo", "env.classes=[echo.py:Echo]", "env.announce_tools=false")
    print(samples(run_dir, 1)[0], records(run_dir)[-1])
