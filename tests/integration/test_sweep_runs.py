"""A sweep of real runs: one that fails leaves the others alone, and the same command makes up for it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import rlhf
from rlhf.errors import EXIT_DONE, EXIT_USER_ERROR

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
def test_a_failed_run_is_reported_and_made_up_for(tmp_path):
    project = tmp_path / "checkpoints" / "rlhf"
    first, second = (project / f"offline-trainer.seed-{seed}" for seed in (1, 2))
    project.mkdir(parents=True)
    first.write_text("in the way")
    code, said = sweep(tmp_path)
    assert code == EXIT_USER_ERROR, said
    assert f"Failed with exit code 2: trainer.seed=1, in {first}" in said
    assert "1 of 2 runs are done." in said
    before = (second / "global_step_1" / "manifest.json").read_bytes()

    first.unlink()
    code, said = sweep(tmp_path)
    assert code == EXIT_DONE, said
    assert f"The run in {second} is finished at step 1." in said
    assert (first / "global_step_1" / "manifest.json").is_file()
    assert (second / "global_step_1" / "manifest.json").read_bytes() == before
