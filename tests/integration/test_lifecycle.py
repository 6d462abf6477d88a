"""The supervisor, and ranks under another launcher, open and finish a run in the same way."""

import fcntl
import json
import os
import threading
from pathlib import Path

import pytest

from rlhf.compose import compose_config
from rlhf.config.library import Library
from rlhf.config.resolved import load
from rlhf.errors import EXIT_DONE
from rlhf.launch.supervisor import supervise
from rlhf.ranks.lock import RANKS_LOCK
from rlhf.storage.layout import RESOLVED
from tests.support.checkpoints import PlainRole, save_steps
from tests.support.launching import ranks, small
from tests.support.rank_scripts import wait_until
from tests.support.sections import prepare
from tests.support.tracked import tensorboard_curves


@pytest.mark.parametrize("torchrun", [False, True])
def test_a_start_completes_trackers_and_report_of_a_finished_run(tmp_path, torchrun):
    """A kill came after the last save and before the trackers ended, so trackers and report lack the last step."""
    command = [f"trainer.default_local_dir={tmp_path}", "trainer.device=cpu", "checkpoint.async_save=false"]
    command += ["trainer.warm_start=false", "trainer.logger=[tensorboard]"]
    config = compose_config(command, Library.find(None))
    save_steps(config, PlainRole(), 80)
    prepare(config)
    (config.run_dir / "metrics.jsonl").write_text('{"step": 80, "val/accuracy": 0.875}\n')
    if torchrun:
        end = ranks(tmp_path / "log", command, nproc=2)
        assert end.code == EXIT_DONE, end.output
    else:
        assert supervise(config, lambda: None) == EXIT_DONE
    assert tensorboard_curves(config.run_dir)["val/accuracy"] == [(80, 0.875)]
    assert json.loads((config.run_dir / "report" / "report.json").read_text())


def test_ranks_of_another_launcher_wait_for_those_of_a_dead_supervisor(tmp_path, sums):
    """The ranks also write the configuration that they train with, as the supervisor does."""
    run_dir, log = tmp_path / "rlhf" / "opened", tmp_path / "log"
    run_dir.mkdir(parents=True)
    fd = os.open(run_dir / RANKS_LOCK, os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_SH)

    def end_of_the_last_rank() -> None:
        wait_until(lambda: log.exists() and "Waiting for the ranks of an earlier start" in log.read_text(), 120)
        assert not (run_dir / RESOLVED).exists()
        os.close(fd)

    other = threading.Thread(target=end_of_the_last_rank)
    other.start()
    command = small(tmp_path, "opened", sums, "trainer.total_training_steps=1", "actor.optim.lr_warmup_steps=0")
    end = ranks(log, command)
    other.join()
    assert end.code == EXIT_DONE, end.output
    assert load(Path(run_dir / RESOLVED)).trainer.total_training_steps == 1
    assert "Waiting for the ranks" in end.output
