"""Failed asynchronous saves: every rank raises the error at the same step, in time, and earlier checkpoints stay
intact."""

import os
import re
import resource
import threading
import time
from pathlib import Path

import pytest

from rlhf.config import Config
from rlhf.errors import EXIT_DONE, UserError
from rlhf.ranks.transport import LostPeer
from rlhf.storage.disk_errors import SaveFailed
from rlhf.storage.layout import TEMPORARY, step_dir
from tests.support.checkpoints import PlainRole, make_checkpointer
from tests.support.forked_start import train_forked
from tests.support.interrupter import at
from tests.support.launching import small, write_sums
from tests.support.saving_behind import DEADLINE_S, Run, on_ranks, published, saving_behind
from tests.support.sections import prepare
from tests.support.thread_ranks import in_front, run_thread_ranks, subscribe
from tests.support.verified import verify


@pytest.fixture
def config(tmp_path) -> Config:
    return saving_behind(tmp_path)


def fill_up(rank: int, config: Config) -> tuple:
    """Save step 1, limit the file size of rank 1 to 100 kB, and train until a rank raises the error."""
    run = Run(rank, config)
    run.checkpointer.save(run.step())
    run.checkpointer.finish()
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    run.checkpointer.save(run.step())
    end = time.monotonic() + DEADLINE_S
    while not any(run.coordinator.all_gather(run.checkpointer.failed)):  # as the loop does after each step
        assert time.monotonic() < end
        time.sleep(0.01)
        assert run.checkpointer.maybe_save(run.step(), {}) is None
    try:
        run.checkpointer.save(run.driver.step)
    except (UserError, SaveFailed) as error:
        return run.driver.step, type(error), str(error)
    return run.driver.step, None, ""


def test_a_failed_background_save_raises_on_every_rank_at_the_same_step(tmp_path, config):
    outcomes = on_ranks(tmp_path, 2, fill_up, config)
    assert outcomes[0][:2] == outcomes[1][:2]
    for step, kind, message in outcomes:
        assert step >= 2
        assert kind is UserError
        assert "The checkpoint of step 2" in message
        assert "rank_00001.safetensors" in message
    assert published(config) == [1]
    assert verify(step_dir(config.run_dir, 1)).step == 1
    assert [path.name for path in config.run_dir.iterdir() if path.name.startswith(TEMPORARY)] == []


def test_a_failed_save_ends_the_attempt_steps_before_the_next_one(tmp_path):
    """The error reaches the loop after a step, not only at the next save."""
    hit = tmp_path / "hit"
    settings = ["trainer.total_training_steps=20", "trainer.save_freq=10", "checkpoint.async_save=true"]
    arguments = [*small(tmp_path, "run", write_sums(tmp_path / "sums.jsonl")), *settings]
    end = train_forked(arguments, at("commit.file_write", 1, "raise", once=hit))
    assert end.code == EXIT_DONE, end.output
    assert hit.exists()
    crash = re.search(r"Crash: rank 0: exit code 1, at step (\d+)", end.output)
    assert crash is not None, end.output
    assert int(crash[1]) < 20
    assert "The checkpoint of step 10" in end.output


def fail_and_go_on(rank: int, config: Config) -> list:
    run, saved = Run(rank, config), []
    for limit in (100_000, resource.RLIM_INFINITY):
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        saved.append(run.checkpointer.save(run.step()))
        saved.append(run.checkpointer.finish())
        saved.append(run.checkpointer.failed)
    return [value.path.name if hasattr(value, "path") else value for value in saved]


def test_on_save_error_continue_trains_on(tmp_path, config):
    config.checkpoint.on_save_error = "continue"
    assert on_ranks(tmp_path, 2, fail_and_go_on, config) == [[None, None, False, None, "global_step_2", False]] * 2
    assert published(config) == [2]


def die_while_writing(rank: int, config: Config) -> str:
    """Rank 1 is killed in the middle of a file while rank 0 trains."""
    run = Run(rank, config)
    run.checkpointer.save(run.step())
    run.checkpointer.finish()
    if rank == 1:
        subscribe(lambda event: os._exit(9) if event == "commit.file_write" else None)
    run.checkpointer.save(run.step())
    run.step()
    try:
        run.checkpointer.save(run.step())
    except SaveFailed as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("on_save_error", ["stop", "continue"])
def test_a_kill_during_the_write_leaves_the_checkpoint_before(tmp_path, config, on_save_error):
    config.checkpoint.on_save_error = on_save_error  # even with "continue", a lost peer is an error
    message, dead = on_ranks(tmp_path, 2, die_while_writing, config)
    assert dead == "died"
    assert "The checkpoint of step 2" in message
    prepare(config)  # a new start
    assert published(config) == [1]
    assert verify(step_dir(config.run_dir, 1)).step == 1
    assert not [path for path in config.run_dir.iterdir() if path.name.startswith(TEMPORARY)]


def stuck(rank: int, config: Config) -> str:
    config.checkpoint.timeout_s = 0.5
    run = Run(rank, config)
    gate = threading.Event()

    def listen(event: str) -> None:
        if event == "commit.fsync" and not in_front():
            gate.wait(DEADLINE_S)

    subscribe(listen)
    run.checkpointer.save(run.step())
    try:
        run.checkpointer.save(run.step())
    except LostPeer as error:
        return str(error)
    finally:
        gate.set()
    return "nothing"


def test_a_disk_that_does_not_answer_ends_the_attempt_within_the_deadline(config):
    [message] = run_thread_ranks(1, stuck, config)
    assert "The checkpoint of step 1 was not written within checkpoint.timeout_s=0.5" in message


def too_large(rank: int, config: Config) -> str:
    role = PlainRole(50_000_000)  # 400 MB with Adam's moments
    checkpointer = make_checkpointer(config, role, 1)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 200_000_000, resource.RLIM_INFINITY))
    try:
        checkpointer.save(1)
    except UserError as error:
        return str(error)
    return "nothing"


def test_no_memory_for_the_copy_names_the_setting(tmp_path, config):
    config.checkpoint.contents = ["model", "optimizer"]
    [message] = on_ranks(tmp_path, 1, too_large, config)
    assert "Set checkpoint.async_save=false" in message
    assert "381.5 MiB on this rank" in message
