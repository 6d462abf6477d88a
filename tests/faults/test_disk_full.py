"""Saves that cannot be written: full disk, file size limit, no permission, a dead rank. Each is reported and loses
nothing."""

import errno
import logging
import os
import resource
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from rlhf.config import Config
from rlhf.errors import EXIT_USER_ERROR, UserError
from rlhf.storage.disk_errors import SaveFailed
from rlhf.storage.layout import POINTER, TEMPORARY, TRASH, scan, step_of
from tests.support.checkpoints import (
    PlainReference,
    PlainRole,
    listening,
    make_checkpointer,
    make_config,
    make_driver,
    resume,
    run_ranks,
)
from tests.support.launching import train
from tests.support.published import eventually
from tests.support.sections import prepare
from tests.support.small_disks import small_disk
from tests.support.thread_ranks import make_coordinator, messages, run_thread_ranks, subscribe
from tests.support.verified import verify

FLOATS = 200_000  # 0.8 MB of weights and as much of moments over all ranks
PROMPT_S = 10.0
DEADLINE_S = 60


@pytest.fixture
def config(tmp_path) -> Config:
    return make_config(tmp_path)


@pytest.fixture
def mounted(tmp_path) -> Iterator[Config]:
    """A run directory on a disk of its own of 6 MiB."""
    with small_disk(tmp_path / "disk", 6) as disk:
        yield make_config(disk)


@pytest.fixture
def processes(tmp_path):
    """Run an attempt on two processes, for tests that limit or kill a process, or change its user."""

    def run(function: Callable, *arguments) -> list:
        join = Path(tempfile.mkdtemp(dir=tmp_path))
        return run_ranks(2, function, *arguments, deadline_s=DEADLINE_S, join=join)

    return run


def ranks(function: Callable, *arguments) -> list:
    """Run an attempt on two ranks. `save` returns the type of its result or error, the message, and the seconds."""
    return run_thread_ranks(2, function, *arguments, deadline_s=DEADLINE_S)


def leftovers(config: Config) -> list[str]:
    return [path.name for path in config.run_dir.iterdir() if path.name.startswith((TEMPORARY, TRASH))]


def assert_whole(config: Config, *steps: int) -> None:
    """Check that exactly the checkpoints of `steps` exist and are intact, that a new start resumes the newest, and
    that no leftover remains."""
    assert [step_of(path) for path in scan(config.run_dir)] == sorted(steps, reverse=True)
    assert [verify(path).step for path in scan(config.run_dir)] == sorted(steps, reverse=True)
    assert (config.run_dir / POINTER).read_text() == f"{max(steps)}\n"
    prepare(config)
    assert leftovers(config) == []
    role = PlainRole(FLOATS)
    assert resume(config, role) == max(steps)
    assert role.position == max(steps)


def save(rank: int, config: Config, step: int, prepare_failure: Callable[[int, Config], None] | None = None) -> tuple:
    """Save `step` on this rank. Return how the save ended."""
    coordinator = make_coordinator()
    role = PlainRole(FLOATS, rank, coordinator.world_size, seed=step)
    checkpointer = make_checkpointer(config, role, step, coordinator)
    if prepare_failure is not None:
        prepare_failure(rank, config)
    started = time.monotonic()
    try:
        result = checkpointer.save(step)
    except Exception as error:
        return type(error), str(error), time.monotonic() - started
    return type(result), "", time.monotonic() - started


def limit_file_size(rank: int, config: Config) -> None:
    """Limit files of this process to 100 kB. Each rank's weights take 400 kB, so the write fails in the middle of a
    file."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))


def limit_file_size_of_rank_1(rank: int, config: Config) -> None:
    if rank == 1:
        limit_file_size(rank, config)


def test_a_write_error_within_a_file_is_raised_on_every_rank(config, processes):
    assert [kind.__name__ for kind, *_ in ranks(save, config, 2)] == ["SaveResult"] * 2
    for kind, message, seconds in processes(save, config, 4, limit_file_size):
        assert kind is UserError  # a restart would reach the same limit
        assert f"The checkpoint of step 4 in {config.run_dir} was not saved; earlier checkpoints are intact." in message
        assert os.strerror(errno.EFBIG) in message
        assert message.endswith("Fix it and run the same command again.")
        assert seconds < PROMPT_S
    assert leftovers(config) == []
    assert_whole(config, 2)


def test_a_failure_of_one_rank_ends_the_save_on_all(config, processes):
    # Promise 8.
    ranks(save, config, 2)
    outcomes = processes(save, config, 4, limit_file_size_of_rank_1)
    for kind, message, seconds in outcomes:
        assert kind is UserError
        assert os.strerror(errno.EFBIG) in message
        assert "actor/model/rank_00001.safetensors" in message
        assert seconds < PROMPT_S
    assert_whole(config, 2)


def save_twice(rank: int, config: Config) -> list[tuple]:
    """Fail at step 4, lift the file size limit, and save step 6, as continued training does."""
    errors = messages(logging.ERROR)
    coordinator = make_coordinator()
    results = []
    for step, limit in ((4, 100_000), (6, resource.RLIM_INFINITY)):
        role = PlainRole(FLOATS, rank, coordinator.world_size, seed=step)
        checkpointer = make_checkpointer(config, role, step, coordinator)
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        results.append(checkpointer.save(step))
    return [None if result is None else result.path.name for result in results] + errors


def test_on_save_error_continue_logs_the_error_and_training_goes_on(config, processes):
    config.checkpoint.on_save_error = "continue"
    ranks(save, config, 2)
    leader, other = processes(save_twice, config)
    assert leader[:2] == other == [None, "global_step_6"]
    [message] = leader[2:]
    assert "The checkpoint of step 4" in message
    assert message.endswith("Training goes on (checkpoint.on_save_error=continue).")
    assert_whole(config, 2, 6)


def test_too_little_room_is_refused_before_a_byte_is_written(mounted):
    ranks(save, mounted, 2)
    filler = mounted.run_dir / "filler"
    stats = os.statvfs(mounted.run_dir)
    filler.write_bytes(bytes(stats.f_bavail * stats.f_frsize - 2_000_000))
    for kind, message, _ in ranks(save, mounted, 4):
        assert kind is UserError
        assert "the save needs 2.6 MiB and the disk has 1.9 MiB free" in message
    assert leftovers(mounted) == []
    filler.unlink()
    assert [kind.__name__ for kind, *_ in ranks(save, mounted, 4)] == ["SaveResult"] * 2
    assert_whole(mounted, 2, 4)


def test_linked_bytes_need_no_room(mounted):
    """A reference of 1 MB and 1.6 MB of other state, on a disk with space for the latter only."""
    driver, reference = make_driver(2), PlainReference(250_000)
    checkpointer = make_checkpointer(mounted, PlainRole(FLOATS), driver=driver, reference=reference)
    checkpointer.save(2)
    filler = mounted.run_dir / "filler"
    stats = os.statvfs(mounted.run_dir)
    room = 3_000_000  # a save must leave 1 MiB of it free
    filler.write_bytes(bytes(stats.f_bavail * stats.f_frsize - room))
    mounted.checkpoint.max_to_keep = 1
    reference.update(3)
    with pytest.raises(UserError, match=r"the save needs 3\.\d MiB and the disk has 2\.9 MiB free"):
        checkpointer.save(4)
    assert leftovers(mounted) == []
    assert checkpointer.resume()
    driver.step = 4
    assert checkpointer.save(4).path.name == "global_step_4"
    assert verify(mounted.run_dir / "global_step_4").linked == {"ref/model": "global_step_2"}


def fill_the_disk(config: Config) -> None:
    """Fill the disk with another program's file."""
    with (config.run_dir / "filler").open("ab", buffering=0) as filler:
        for size in (1 << 16, 1 << 12):
            with suppress(OSError):
                while filler.write(bytes(size)) == size:
                    pass


def neighbour_fills_the_disk(rank: int, config: Config) -> None:
    """Another program fills the disk after the space check, when the first file is open."""
    if rank == 1:
        subscribe(lambda event: fill_the_disk(config) if event == "commit.file_write" else None)


def test_a_disk_that_fills_up_during_the_save(mounted):
    ranks(save, mounted, 2)
    outcomes = ranks(save, mounted, 4, neighbour_fills_the_disk)
    for kind, message, seconds in outcomes:
        assert kind is UserError
        assert "The checkpoint of step 4" in message
        assert os.strerror(errno.ENOSPC) in message
        assert seconds < PROMPT_S
    assert leftovers(mounted) == []
    (mounted.run_dir / "filler").unlink()
    assert_whole(mounted, 2)


@pytest.mark.parametrize("event", ["commit.manifest", "commit.rename", "commit.pointer"])
def test_a_disk_that_fills_up_in_a_window_of_the_commit(mounted, event, caplog):
    mounted.checkpoint.max_to_keep = 1
    save(0, mounted, 2)
    with listening(lambda now: fill_the_disk(mounted) if now == event else None):
        kind, message, _ = save(0, mounted, 4)
    (mounted.run_dir / "filler").unlink()
    if event == "commit.manifest":
        assert kind is UserError
        assert os.strerror(errno.ENOSPC) in message
        assert_whole(mounted, 2)
    else:
        # Renaming needs no space. The pointer may fail; the checkpoint is complete without it.
        assert kind.__name__ == "SaveResult", message
        assert f"{POINTER} could not be written and is removed" in caplog.text
        assert not (mounted.run_dir / POINTER).exists()
        assert [step_of(path) for path in scan(mounted.run_dir)] == [4]
        assert resume(mounted, PlainRole(FLOATS)) == 4


def test_a_disk_that_turns_read_only(mounted):
    save(0, mounted, 2)
    disk = mounted.run_dir.parents[1]
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    kind, message, _ = save(0, mounted, 4)
    assert kind is UserError
    assert os.strerror(errno.EROFS) in message
    subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
    assert_whole(mounted, 2)


def lose_permission_on_rank_1(rank: int, config: Config) -> None:
    if rank == 1:
        os.seteuid(65534)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to let one rank be another user")
def test_a_permission_error_of_one_rank_is_raised_on_every_rank(config, processes):
    ranks(save, config, 2)
    for kind, message, seconds in processes(save, config, 4, lose_permission_on_rank_1):
        assert kind is UserError
        assert os.strerror(errno.EACCES) in message
        assert seconds < PROMPT_S
    assert_whole(config, 2)


def obstruct_rank_1(rank: int, config: Config) -> None:
    """A folder has the name of rank 1's second file: an error that a restart may fix."""

    def listener(event: str) -> None:
        for temporary in config.run_dir.glob(f"{TEMPORARY}*"):
            (temporary / "actor/optimizer/rank_00001.safetensors").mkdir(parents=True, exist_ok=True)

    if rank == 1:
        subscribe(listener)


def test_an_error_that_a_restart_may_cure_ends_the_attempt_not_the_run(config):
    ranks(save, config, 2)
    for kind, message, seconds in ranks(save, config, 4, obstruct_rank_1):
        assert kind is SaveFailed
        assert "rank_00001.safetensors" in message
        assert seconds < PROMPT_S
    assert_whole(config, 2)


def die_on_rank_1(rank: int, config: Config) -> None:
    if rank == 1:
        subscribe(lambda event: os._exit(9) if event == "commit.fsync" else None)


def test_a_rank_that_dies_in_the_save_is_an_error_on_the_other_at_once(config, processes):
    ranks(save, config, 2)
    (kind, message, seconds), dead = processes(save, config, 4, die_on_rank_1)
    assert dead == "died"
    assert kind is SaveFailed
    assert "The checkpoint of step 4" in message
    assert seconds < PROMPT_S
    assert_whole(config, 2)


def test_saving_an_existing_step_is_rejected_and_keeps_it(config):
    # Promise 3.
    ranks(save, config, 2)
    for kind, message, _ in ranks(save, config, 2):
        assert kind is SaveFailed
        assert "a published checkpoint is never overwritten" in message
    assert_whole(config, 2)


def test_an_old_checkpoint_that_cannot_be_removed_costs_room_not_the_run(config, caplog):
    config.checkpoint.max_to_keep = 1
    save(0, config, 2)
    old = config.run_dir / "global_step_2"

    def obstruct(event: str) -> None:
        if event == "commit.trash":  # the folder is renamed, and disappears before it is deleted
            for trash in config.run_dir.glob(f"{TRASH}*"):
                trash.rename(trash.with_name("taken"))

    with listening(obstruct):
        assert save(0, config, 4)[0].__name__ == "SaveResult"
    assert not old.exists()
    eventually(lambda: "could not be removed" in caplog.text)
    assert_whole(config, 4)


def test_a_failed_clean_up_does_not_hide_why_the_save_failed(config, caplog):
    save(0, config, 2)

    def obstruct(event: str) -> None:
        if event == "commit.file_write":
            for temporary in config.run_dir.glob(f"{TEMPORARY}*"):
                (temporary / "actor/optimizer/rank_00000.safetensors").mkdir(parents=True, exist_ok=True)
        if event == "commit.trash":
            for trash in config.run_dir.glob(f"{TRASH}*"):
                trash.rename(trash.with_name("taken"))

    with listening(obstruct):
        kind, message, _ = save(0, config, 4)
    assert kind is SaveFailed
    assert "actor/optimizer/rank_00000.safetensors" in message
    assert "could not be removed" in caplog.text
    assert_whole(config, 2)


@pytest.mark.parametrize("condition", ["full", "read-only"])
def test_a_start_on_a_full_or_read_only_disk_is_one_message(tmp_path, condition):
    """The start ends with exit code 2 and no traceback."""
    with small_disk(tmp_path / "disk", 1) as disk:
        (disk / "rlhf" / "offline").mkdir(parents=True)
        if condition == "full":
            with suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
                while filler.write(bytes(4096)):
                    pass
        else:
            subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        end = train([f"trainer.default_local_dir={disk}", "trainer.total_training_steps=1"])
    assert end.code == EXIT_USER_ERROR
    assert "Traceback" not in end.output
    assert f"Cannot read or write the run directory {disk}/rlhf/offline: " in end.output
    assert "trainer.default_local_dir" in end.output
