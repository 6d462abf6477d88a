"""wandb (offline) and TensorBoard in a run that is killed and resumed: every step once and in order in both."""

import pytest

from rlhf.checkpoint.state.run_file import read_run_file
from rlhf.errors import EXIT_DONE
from tests.support.interrupter import at
from tests.support.launching import ranks, records, saved_steps, small
from tests.support.tracked import tensorboard_curves, wandb_items


@pytest.mark.slow
def test_both_trackers_show_every_step_once_after_a_kill(tmp_path, sums):
    saved = "checkpoint.async_save=false"  # so that step 3 is saved when the kill comes
    command = small(
        tmp_path, "tracked", sums, "trainer.logger=[wandb,tensorboard]", "tracking.wandb.mode=offline", saved
    )
    run_dir = tmp_path / "rlhf" / "tracked"
    # Steps 4 and 5 are logged and lost: the last checkpoint is that of step 3.
    killed = ranks(tmp_path / "log", command, at("update.before", 6, "SIGKILL"))
    assert killed.code == -9, killed.output
    assert saved_steps(run_dir) == [3]
    end = ranks(tmp_path / "log", command)
    assert end.code == EXIT_DONE, end.output
    assert "training goes on" not in end.output

    steps = [record["step"] for record in records(run_dir)]
    assert steps == list(range(1, 8))
    curves = tensorboard_curves(run_dir)
    assert [step for step, _ in curves["reward/mean"]] == steps
    (segment,) = (run_dir / "wandb").glob("offline-run-*")
    items = wandb_items(segment, read_run_file(run_dir)["run_id"])
    assert [item["_step"] for item in items] == steps
    assert [item["reward/mean"] for item in items] == [record["reward/mean"] for record in records(run_dir)]
