"""docs/migrating.md: its commands are valid, and its tables agree with the command line's answers to the names."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import yaml

import rlhf
from rlhf.api import check_inputs
from rlhf.compose import compose_config
from rlhf.config.library import Library
from rlhf.config.rules.validate import validate
from rlhf.errors import UserError
from rlhf.train import main

FOREIGN = Path(__file__).parents[1] / "data" / "foreign"
PAGE = (Path(rlhf.__file__).parents[1] / "docs/migrating.md").read_text()
BLOCKS = re.findall(r"^```\n(.*?)^```$", PAGE, flags=re.S | re.M)
COMMANDS = [block for block in BLOCKS if block.startswith("python -m rlhf.train")]
TRANSLATION = [block for block in BLOCKS if "rlhf.translate" in block]
ROWS = [line.strip("|").split("|") for line in PAGE.splitlines() if line.startswith("| `")]
NAMES = [(row[0], row[1]) for row in ROWS if len(row) == 2]
NAMES = [(name, ours) for theirs, ours in NAMES for name in re.findall(r"`([^`]+)`", theirs)]
DEFAULTS = [(name, row[1]) for row in ROWS if len(row) == 3 for name in re.findall(r"`([^`]+)`", row[0])]
# Names whose answer need not have the settings of their row, and (None) names that are valid here with other meanings.
ELSEWHERE = {"beta": "actor.use_kl_loss", "algorithm.adv_estimator": None, "algorithm.kl_ctrl.kl_coef": None}


@pytest.fixture
def user_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the files that the page's commands name."""
    monkeypatch.chdir(tmp_path)
    row = {"data_source": "sums", "prompt": [{"role": "user", "content": "1 + 1 ="}], "extra_info": {"index": 0}}
    verl = pyarrow.Table.from_pylist([row | {"reward_model": {"style": "rule", "ground_truth": "2"}}])
    for name in ("train.parquet", "test.parquet"):
        pyarrow.parquet.write_table(verl, name)
    shutil.copytree(Path(rlhf.__file__).parent / "models" / "tiny_policy", "models/policy")
    config = Path("models/policy/config.json")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 4096}))
    Path("train.jsonl").write_text(json.dumps({"prompt": "1 + 1 =", "answer": "2"}) + "\n")
    Path("prompts.jsonl").write_text(json.dumps({"input": "1 + 1 =", "label": "2"}) + "\n")
    Path("my_reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):\n    return 0.0\n"
    )
    Path("my_rewards.py").write_text("def accuracy(prompts, completions, answer, **kwargs):\n    return [0.0]\n")


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: re.search(r"from_\w+", command)[0])
@pytest.mark.usefixtures("user_files")
def test_a_command_of_the_page_is_valid(command: str) -> None:
    config = compose_config(shlex.split(command.replace("\\\n", ""))[3:], Library.find(None))
    validate(config)
    check_inputs(config)


@pytest.mark.usefixtures("user_files")
def test_the_translation_of_the_page_makes_a_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = TRANSLATION
    *making, training = block.splitlines()
    shutil.copy(FOREIGN / "verl_grpo.sh", "run_qwen2-7b.sh")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(Path(rlhf.__file__).parents[1]))
    subprocess.run(["bash", "-ec", "\n".join(making)], check=True)
    folder, recipe = shlex.split(training)[4:]
    config = compose_config([recipe], Library.find(Path(folder)))
    assert config.model.path == "Qwen/Qwen2-7B-Instruct"


def test_the_page_shows_what_a_habit_is_answered_with(capsys: pytest.CaptureFixture[str]) -> None:
    shown = [block for block in BLOCKS if block.startswith("$ ")]
    assert len(shown) + len(COMMANDS) + len(TRANSLATION) == len(BLOCKS)
    assert len(shown) == 1
    command, answer = shown[0].split("\n", 1)
    assert main(shlex.split(command)[4:]) == 2
    assert capsys.readouterr().err == answer


@pytest.mark.parametrize(("name", "ours"), NAMES, ids=[name for name, _ in NAMES])
def test_a_name_of_a_table_is_answered_with_its_row(name: str, ours: str) -> None:
    named = {code.partition("=")[0] for code in re.findall(r"`([^`]+)`", ours)}
    if name.startswith("."):
        name = "custom_reward_function" + name
    try:
        validate(compose_config([name if "=" in name else f"{name}=1"], Library.find(None)), {})
    except UserError as error:
        answer = str(error)
    else:
        assert name in ELSEWHERE
        return
    assert ELSEWHERE.get(name) or any(re.search(rf"\b{re.escape(each)}\b", answer) for each in named), answer


@pytest.mark.parametrize(("name", "shown"), DEFAULTS, ids=[name for name, _ in DEFAULTS])
def test_a_default_of_the_table_is_ours(name: str, shown: str) -> None:
    config = compose_config(["recipes=null", "model=tiny", "data.train_files=train.jsonl"], Library.find(None))
    (value,) = re.findall(r"`([^`]+)`", shown)
    assert attrgetter(name)(config) == yaml.safe_load(value)
