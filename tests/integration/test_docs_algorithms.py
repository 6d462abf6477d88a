"""The worked example of docs/algorithms.md: its files and its command, shortened to two steps."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf.errors import EXIT_DONE
from tests.support.launching import DEADLINE_S, ROOT, records

PAGE = (ROOT / "docs" / "algorithms.md").read_text()
SHORT = [
    "trainer.total_training_steps=2",
    "trainer.save_freq=0",
    "trainer.test_freq=0",
    "trainer.val_before_train=false",
    "trainer.device=cpu",
    "data.train_batch_size=8",
    "actor.ppo_mini_batch_size=4",
]


def blocks(mark: str) -> list[tuple[str, str]]:
    """Return the text after `mark` in the comment before each fenced block, and the block."""
    return re.findall(rf"<!-- {mark}([^\n]*?) -->\n```\w*\n(.*?)```\n", PAGE, flags=re.DOTALL)


@pytest.mark.slow
def test_the_example_trains(tmp_path: Path):
    files = blocks("file: ")
    assert [name for name, _ in files] == ["mine/functions.py", "mine/recipes/median.yaml"]
    for name, text in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    ((_, command),) = blocks("command")
    python, *arguments = shlex.split(command)
    assert python == "python"
    done = subprocess.run(
        [sys.executable, *arguments, *SHORT],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == EXIT_DONE, done.stdout
    steps = [step for step in records(tmp_path / "checkpoints" / "rlhf" / "median") if "actor/pg_loss" in step]
    assert len(steps) == 2
    # The first mini-batch is on-policy (distance 0), the second is off-policy.
    assert all(step["actor/distance"] > 0 for step in steps)
