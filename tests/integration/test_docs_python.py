"""Scripts of docs/python.md and README.md train and report; a callback that raises stops a run, which resumes."""

import json
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import rlhf
from rlhf.errors import EXIT_REQUEUE
from tests.support.compare_runs import differences
from tests.support.launching import ROOT

PAGE = (ROOT / "docs" / "python.md").read_text()
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"<!-- (file|command): ([^\n]*?) -->\n```\w*\n(.*?)```\n", PAGE, flags=re.DOTALL)
SHORT = ["recipes=minimal", "model=tiny", "trainer.device=cpu", "trainer.threads_per_rank=1", "trainer.nproc=1"]
SIZES = ["data.train_batch_size=2", "actor.ppo_mini_batch_size=2", "data.max_response_length=4", "rollout.n=2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The page's files."""
    folder = tmp_path_factory.mktemp("page")
    for kind, name, text in BLOCKS:
        if kind == "file":
            (folder / name).write_text(text)
    return folder


@pytest.mark.slow
def test_the_script_of_the_page(folder):
    (command,) = [text.split() for kind, _, text in BLOCKS if kind == "command"]
    outputs = []
    for _ in range(2):
        run = subprocess.run(
            [sys.executable, *command[1:]], cwd=folder, stdout=subprocess.PIPE, text=True, check=True, timeout=300
        )
        outputs.append(run.stdout)
    history = folder / "checkpoints/rlhf/tuned/metrics.jsonl"
    records = [json.loads(line) for line in history.read_text().splitlines()]
    expected = [f"step {record['step']}: reward {record.get('reward/mean')}" for record in records]
    end = f"steps: 4 checkpoint: {folder}/checkpoints/rlhf/tuned/global_step_4"
    assert [record["step"] for record in records][-4:] == [1, 2, 3, 4]
    assert outputs[0].splitlines() == [*expected, end]
    assert outputs[1].splitlines() == [end]


@pytest.mark.slow
def test_the_script_of_the_readme(tmp_path):
    (script,) = re.findall(r"<!-- file: closeness.py -->\n```python\n(.*?)```\n", README, flags=re.DOTALL)
    (tmp_path / "closeness.py").write_text(script)
    run = subprocess.run(
        [sys.executable, "closeness.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True, timeout=300
    )
    assert run.stdout == f"4 {tmp_path}/checkpoints/rlhf/closeness/global_step_4\n"


@pytest.mark.slow
def test_a_callback_stops_a_run_in_a_thread_and_the_next_call_finishes_it(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    from score import closeness  # type: ignore[import-not-found]

    class Enough(Exception):
        pass

    def stop_at_two(step, metrics):
        if step == 2:
            raise Enough

    def settings(name: str) -> list[str]:
        length = ["trainer.total_training_steps=400", "trainer.save_freq=1000"]
        return [*SHORT, *SIZES, *length, "data.train_files=train.jsonl", f"trainer.experiment_name={name}"]

    raised: list[BaseException] = []

    def in_thread():
        try:
            rlhf.train(settings("stopped"), reward=closeness, callbacks=[stop_at_two])
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join(120)
    assert [type(error) for error in raised] == [Enough]
    run_dir = folder / "checkpoints/rlhf/stopped"
    (saved,) = [int(path.name.removeprefix("global_step_")) for path in run_dir.glob("global_step_*")]
    assert 2 <= saved < 400
    seen: list[int] = []
    end = f"trainer.total_training_steps={saved + 2}"
    report = rlhf.train(
        [*settings("stopped"), end], reward=closeness, callbacks=[lambda step, metrics: seen.append(step)]
    )
    assert report["steps"] == saved + 2
    assert seen == [saved + 1, saved + 2]
    rlhf.train([*settings("whole"), end], reward=closeness)
    assert differences(run_dir, folder / "checkpoints/rlhf/whole") == []


def test_a_run_that_is_stopped_says_so(folder, monkeypatch):
    error = rlhf.RunEnded(EXIT_REQUEUE, folder)
    assert error.exit_code == EXIT_REQUEUE
    assert "The same call continues the run." in str(error)
