"""Failed last saves: log and exit code of the run agree with the disk."""

import errno
import os
from pathlib import Path

import pytest

from rlhf.checkpoint.export import finished_export
from rlhf.compose import compose_config
from rlhf.config import Config
from rlhf.config.library import Library
from rlhf.errors import EXIT_DONE, EXIT_REQUEUE, EXIT_USER_ERROR, Preempted, Unsaved, UserError
from rlhf.launch.supervisor import supervise
from rlhf.storage.disk_errors import SaveFailed
from tests.support.checkpoints import PlainRole, save_steps
from tests.support.forked_start import train_forked
from tests.support.interrupter import at
from tests.support.launching import small, write_sums
from tests.support.saving_behind import Run, published, saving_behind
from tests.support.sections import prepare
from tests.support.small_disks import small_disk
from tests.support.thread_ranks import messages, run_thread_ranks, subscribe

WAYS = ["leave", "last"]


@pytest.fixture(params=[True, False], ids=["behind", "in front"])
def config(request, tmp_path) -> Config:
    config = saving_behind(tmp_path)
    config.checkpoint.async_save = request.param
    config.checkpoint.on_save_error = "continue"
    config.trainer.save_freq = 2
    return config


def end(rank: int, config: Config, way: str, code: int, saved: list[int]) -> tuple[type, str, list[str]]:
    """Save the steps `saved`. Then rank 1's disk fails with `code`: the save of step 2 fails, and the run ends at
    step 3."""
    logged = messages()
    run = Run(rank, config)
    checkpointer = run.checkpointer

    def fail(event: str) -> None:
        if event == "commit.file_write":
            raise OSError(code, os.strerror(code))

    try:
        with checkpointer.committing():
            if (step := run.step()) in saved:
                checkpointer.save(step)
                checkpointer.finish()
            if rank == 1:
                subscribe(fail)
            checkpointer.maybe_save(run.step(), {})
            if way == "leave":
                checkpointer.leave(run.step(), {})
            checkpointer.maybe_save(run.step(), {}, last=True)
    except (Preempted, Unsaved, UserError, SaveFailed) as error:
        return type(error), str(error), logged
    return type(None), "", logged


@pytest.mark.parametrize("saved", [[], [1]])
def test_a_failed_save_at_a_stop_request_reports_the_newest_checkpoint(config, saved):
    # Promise 18.
    for kind, message, logged in run_thread_ranks(2, end, config, "leave", errno.EIO, saved):
        assert kind is Unsaved
        assert message.startswith("Asked to stop: left without saving step 3. The checkpoint of step 3 in ")
        newest = f"continues from {config.run_dir / 'global_step_1'}." if saved else "starts the run again."
        assert message.endswith(f"The same command {newest}")
        assert not any("step 3" in line and "goes on" in line for line in logged)
    assert published(config) == saved


def test_a_failed_last_save_fails_the_run(config):
    for rank, (kind, message, logged) in enumerate(run_thread_ranks(2, end, config, "last", errno.EIO, [])):
        assert kind is SaveFailed
        assert "The checkpoint of step 3" in message
        gone_on = [line for line in logged if line.endswith("Training goes on (checkpoint.on_save_error=continue).")]
        assert ["The checkpoint of step 2" in line for line in gone_on] == [True] * (rank == 0)
    assert published(config) == []


@pytest.mark.parametrize("way", WAYS)
def test_a_save_error_that_a_restart_would_repeat_is_a_user_error(config, way):
    for kind, message, _ in run_thread_ranks(2, end, config, way, errno.ENOSPC, []):
        assert kind is UserError
        assert "The checkpoint of step 3" in message
        assert message.endswith("Fix it and run the same command again.")


def save_and_leave(rank: int, config: Config) -> str:
    run = Run(rank, config)
    with pytest.raises(Preempted) as left, run.checkpointer.committing():
        run.checkpointer.leave(run.step(), {})
    return str(left.value)


def test_a_successful_save_at_a_stop_request_is_reported(config):
    # Promise 18.
    for message in run_thread_ranks(2, save_and_leave, config):
        assert message == "Asked to stop: saved step 1 and left. The same command continues from there."
    assert published(config) == [1]


@pytest.mark.parametrize("way", WAYS)
def test_no_message_sends_a_user_to_a_command_that_deletes_the_run(config, way):
    """It once said that the same command continues, but with trainer.overwrite=true this command empties the run."""
    config.trainer.overwrite = True
    for code in (errno.EIO, errno.ENOSPC):
        saved = [1] if code == errno.EIO else []
        for kind, message, _ in run_thread_ranks(2, end, config, way, code, saved):
            assert kind is SaveFailed or "he same command without trainer.overwrite=true " in message


@pytest.mark.parametrize("asked", [True, False], ids=["SIGTERM", "the last step"])
def test_a_run_on_a_full_disk_is_not_done(tmp_path, asked):
    """The log reports no save that failed, and the exit code is neither 75 nor 0."""
    sums = write_sums(tmp_path / "sums.jsonl")
    with small_disk(tmp_path / "disk", 2) as disk:
        settings = ["trainer.total_training_steps=3", "trainer.save_freq=1", "checkpoint.on_save_error=continue"]
        interrupt = at("update.before", 2, "SIGTERM") if asked else {}
        ended = train_forked([*small(disk, "run", sums), *settings], interrupt)
        assert not list(Path(disk).rglob("global_step_*"))
    assert ended.code == EXIT_USER_ERROR, ended.output
    assert "Training goes on (checkpoint.on_save_error=continue)." in ended.output
    assert f"The checkpoint of step {2 if asked else 3}" in ended.output.splitlines()[-1]
    assert "Done" not in ended.output
    assert "saved step" not in ended.output
    assert "saved and left" not in ended.output


def test_a_finished_run_without_its_copies_is_to_be_started_again(tmp_path):
    """The remote is too small. The run and every later start report the missing copies."""
    sums = write_sums(tmp_path / "sums.jsonl")
    with small_disk(tmp_path / "remote", 1) as remote:
        settings = ["trainer.total_training_steps=2", f"checkpoint.remote=file://{remote}", "checkpoint.timeout_s=5"]
        command = [*small(tmp_path, "run", sums), *settings]
        lacking = (
            f"The training is finished and saved in {tmp_path / 'rlhf/run'}, but checkpoint.remote=file://{remote} "
            "lacks global_step_2. Run the same command again to copy the rest."
        )
        first, again = train_forked(command), train_forked(command)
    assert first.code == again.code == EXIT_REQUEUE, first.output + again.output
    assert lacking in first.output
    assert lacking in again.output
    assert "is finished at step 2" in again.output


def test_a_disk_that_takes_no_export_does_not_keep_a_finished_run_from_its_copies(tmp_path, monkeypatch):
    """The export fails. The copies to the remote are made before."""
    remote = tmp_path / "remote"
    settings = [f"trainer.default_local_dir={tmp_path}", "trainer.device=cpu", "trainer.total_training_steps=2"]
    finished = [*settings, "checkpoint.async_save=false"]
    config = compose_config(finished, Library.find(None))
    save_steps(config, PlainRole(), 2)
    prepare(config)
    (config.run_dir / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(finished_export, "export_finished", fail)
    asked = [f"checkpoint.remote=file://{remote}", "checkpoint.timeout_s=5", "trainer.warm_start=false"]
    assert supervise(compose_config([*settings, *asked], Library.find(None)), lambda: None) == EXIT_DONE
    assert list(remote.rglob("global_step_2"))
