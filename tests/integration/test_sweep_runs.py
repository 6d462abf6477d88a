"""A sweep of real runs: a failed run does not stop the others, and the same command starts it again."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import rlhf
from rlhf.cli.compare import main
from rlhf.errors import EXIT_DONE, EXIT_REQUEUE, EXIT_USER_ERROR
from tests.support.launching import TINY_POLICY, policy_that_blocks_loading, write_sums

SMALL = [
    "trainer.total_training_steps=1",
    "trainer.val_before_train=false",
    "trainer.test_freq=0",
    "data.train_batch_size=4",
    "actor.ppo_mini_batch_size=4",
    "rollout.n=2",
    "data.max_response_length=4",
    "trainer.device=cpu",
]


def sweep(folder: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "rlhf.train", "-m", *SMALL, "trainer.seed=1,2"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(Path(rlhf.__file__).parents[1])},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stderr


@pytest.mark.slow
def test_a_failed_run_is_reported_and_started_again_by_the_same_command(tmp_path, capsys):
    project = tmp_path / "checkpoints" / "rlhf"
    first, second = (project / f"offline-trainer.seed-{seed}" for seed in (1, 2))
    project.mkdir(parents=True)
    first.write_text("in the way")
    code, output = sweep(tmp_path)
    assert code == EXIT_USER_ERROR, output
    assert f"Failed with exit code 2: trainer.seed=1, in {first}" in output
    assert "1 of 2 runs are done." in output
    row = re.search(r"trainer.seed=1 .*\ntrainer.seed=2 .*", output)
    assert row is not None, output
    wrong, right = (line.split() for line in row[0].splitlines())
    assert wrong == ["trainer.seed=1", "-", "-", "-", "failed", "(2)"]
    assert (right[1], right[-1], len(right)) == ("1", "finished", 5)
    before = (second / "global_step_1" / "manifest.json").read_bytes()

    first.unlink()
    code, output = sweep(tmp_path)
    assert code == EXIT_DONE, output
    assert f"The run in {second} is finished at step 1" in output
    assert (first / "global_step_1" / "manifest.json").is_file()
    assert (second / "global_step_1" / "manifest.json").read_bytes() == before
    page = (project / "offline-sweep.html").read_text()
    assert first.name in page
    assert second.name in page
    shown = output.partition("Results of the sweep:\n")[2].splitlines()[1:3]
    assert main([str(first), str(second)]) == EXIT_DONE
    compared = capsys.readouterr().out.splitlines()
    assert [line.split()[1:] for line in shown] == [line.split()[-4:] for line in compared if line.endswith("finished")]


def test_sigterm_between_two_runs_stops_the_sweep(tmp_path):
    """The first run is rejected. The second run waits before it has ranks."""
    wrong, waits = shutil.copytree(TINY_POLICY, tmp_path / "wrong"), policy_that_blocks_loading(tmp_path / "waits")
    (wrong / "chat_template.jinja").write_text("{% if %}")
    command = ["-m", "rlhf.train", "-m", "recipes=null", *SMALL, f"model.path={wrong},{waits}"]
    process = subprocess.Popen(
        [sys.executable, *command, f"data.train_files={write_sums(tmp_path / 'sums.jsonl')}", "reward=exact_match"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(rlhf.__file__).parents[1])},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    output = ""
    while "Run 2 of 2: " not in output:
        line = process.stderr.readline()
        assert line, output
        output += line
    assert "not a valid chat template" in output
    process.send_signal(signal.SIGTERM)
    output = process.stderr.read()
    assert process.wait() == EXIT_REQUEUE
    assert output.endswith("SIGTERM while no rank was training. The same command starts the run again.\n")
    assert "runs are done" not in output
