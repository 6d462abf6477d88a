"""The files and commands of docs/environments.md: each environment of the page trains, and Shop resumes."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from rlhf.config.schema.env import EnvConfig
from rlhf.environments.sessions import Call, EnvironmentPool, Session
from rlhf.errors import EXIT_DONE
from tests.support.compare_runs import differences
from tests.support.launching import ROOT, ranks, records

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs" / "environments.md").read_text()
BLOCKS = re.findall(r"<!-- (file|command): ([^\n]*?) -->\n```\w*\n(.*?)```\n", PAGE, flags=re.DOTALL)
FILES = {name: text for kind, name, text in BLOCKS if kind == "file"}
COMMAND, AGENT_COMMAND, LIBRARY_COMMAND = [
    shlex.split(text.replace("\\\n", ""))[3:] for kind, _, text in BLOCKS if kind == "command"
]
QUIET = ("trainer.device=cpu", "trainer.total_training_steps=2", "trainer.save_freq=1", "trainer.log_rollouts=-1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The page's files."""
    folder = tmp_path_factory.mktemp("page")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


def run(folder: Path, name: str, *more: str, command: list[str] = COMMAND) -> Path:
    """Run a command of the page in `folder` to the end of its two steps, and return the run directory."""
    end = ranks(folder / f"{name}.log", [*command, f"trainer.experiment_name={name}", *QUIET, *more], folder=folder)
    assert end.code == EXIT_DONE, end.output
    return folder / "checkpoints" / "rlhf" / name


def samples(run_dir: Path, step: int) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "samples" / f"step_{step}.jsonl").read_text().splitlines()]


def test_this_file_runs_every_block_of_the_page():
    assert FILES.keys() == {"shop.py", "shop.jsonl", "echo.py", "guess_agent.py", "tasks.jsonl"}
    assert PAGE.count("```") == 2 * (len(FILES) + 3)


def test_an_environment_of_another_library_trains(folder):
    run_dir = run(folder, "skyrl", command=LIBRARY_COMMAND)
    assert [record["env/failed"] for record in records(run_dir) if record["step"]] == [0, 0]
    assert all("#### ANSWER" in sample["response"] for sample in samples(run_dir, 1))


def test_the_shop_trains_and_resumes_to_the_same_bits(folder, tmp_path):
    run_dir = run(folder, "shop")
    whole = tmp_path / "whole"
    shutil.copytree(run_dir, whole)
    assert [record["step"] for record in records(whole) if record["step"]] == [1, 2]
    for sample in samples(whole, 1):
        assert "buy(item: string, price: integer)" in sample["prompt"]
        assert " things. You have 12 coins.<" in sample["prompt"] or " can. You have 20 coins.<" in sample["prompt"]
        assert sample["rewards"].keys() == {"Shop"}
    shutil.rmtree(run_dir / "global_step_2")
    run(folder, "shop")
    assert differences(whole, run_dir) == []


def test_the_shop_answers_rejects_and_rewards(folder):
    """The tiny policy seldom buys, so the test makes the calls."""
    pool = EnvironmentPool(EnvConfig(classes=[f"{folder}/shop.py:Shop"])).start()
    try:
        session = Session(pool, 0, seed=1)
        rows: list[Call] = [{"op": "reset", "row": {"budget": 12, "prompt": []}}]
        buys: list[Call] = [
            {"op": "tool", "name": "buy", "arguments": {"item": "tea", "price": price}} for price in (5, 8)
        ]
        replies = session.make([*rows, *buys, {"op": "reward"}])
        assert replies == [
            {"value": " You have 12 coins."},
            {"value": "7 coins left"},
            {"rejected": "too expensive"},
            {"value": 0.1},
        ]
        assert session.state is not None
        again = Session(pool, 0, seed=1)
        again.record(rows + buys, replies[:3], session.state)
        assert again.make([buys[0]]) == [{"value": "2 coins left"}]
    finally:
        pool.close()


def test_the_echo_trains_on_free_text(folder):
    run_dir = run(folder, "echo", "env.classes=[echo.py:Echo]")
    for sample in samples(run_dir, 1):
        turns = [text for who, text in sample["parts"] or () if who == "policy"]
        if len(turns) == 2:
            assert "again" in sample["response"]
        assert sample["rewards"]["Echo"] == sum(len(text.removesuffix("<|end|>")) < 20 for text in turns)
    assert records(run_dir)[-1]["env/turns"] > 1


def test_the_agent_trains_on_the_bits_of_the_bundled_game(folder):
    """The game is a class, the agent a program with OpenAI's client; the policy writes the same in both."""
    agent = run(folder, "guess_agent", command=AGENT_COMMAND)
    of_class = [each for each in AGENT_COMMAND if not each.startswith(("env=", "env.command="))]
    game = run(folder, "guess_class", command=of_class)
    for step in (1, 2):
        assert [(s["prompt"], s["response"], s["score"]) for s in samples(agent, step)] == [
            (s["prompt"], s["response"], s["score"]) for s in samples(game, step)
        ]
    pair = [{name: record[name] for name in ("actor/grad_norm", "reward/mean", "env/turns")}
            for record in (records(agent)[-1], records(game)[-1])]  # fmt: skip
    assert pair[0] == pair[1]
