"""Faults of nodes with node-local disks: a kill in the commit, a full disk, a lost disk, a damaged disk."""

import errno
import os
import shutil
import signal
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest

from rlhf.checkpoint.commit import publication, retention
from rlhf.checkpoint.commit.deleter import Deleter
from rlhf.checkpoint.save import pending as save_pending
from rlhf.checkpoint.save.disk_space import make_room
from rlhf.checkpoint.start import domains
from rlhf.config.schema.checkpoint import CheckpointConfig
from rlhf.errors import UserError
from rlhf.ranks.transport import LostPeer
from rlhf.storage import files
from rlhf.storage.disk_errors import SaveFailed
from rlhf.storage.layout import MANIFEST, set_aside_dirs, step_dir
from tests.support.checkpoints import equal_bits, files_of, flip_bit
from tests.support.nodes import on_node, resume, save, start
from tests.support.published import publish, publish_part, steps
from tests.support.saving_behind import on_ranks, published
from tests.support.small_disks import small_disk
from tests.support.thread_ranks import make_coordinator, messages, replaced, run_thread_ranks, subscribe

KILLED_AT = 3
MIB = 1 << 20


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Shorten the wait before a second look for a file: no folder in these tests shows a file late. Ranks in processes
    keep the real wait."""
    monkeypatch.setattr(domains, "LOOK_AGAIN_S", 0.001)


def kill_in_a_save(rank: int, tmp_path: Path, event: str, victim: int) -> dict:
    """Save three steps and kill rank `victim` at `event` of the last save. Return the state of the third step."""
    config = on_node(tmp_path, rank)
    config.checkpoint.timeout_s = 5
    run = start(rank, config)
    run.checkpointer.resume()

    def listen(what: str) -> None:
        if what == event and run.driver.step == KILLED_AT and rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    subscribe(listen)
    while run.driver.step < KILLED_AT - 1:
        run.checkpointer.save(run.step())
        run.checkpointer.finish()
    run.step()
    state = run.everything()
    try:
        run.checkpointer.save(KILLED_AT)
        run.checkpointer.finish()
    except (SaveFailed, LostPeer):
        pass
    return {"state": state}


@pytest.mark.parametrize(
    ("event", "victim", "left", "resumed_step"),
    [
        # One disk has renamed, the other has not: the next start completes the commit.
        ("commit.rename", 1, ([3, 2, 1], [2, 1]), 3),
        ("commit.rename", 0, ([2, 1], [3, 2, 1]), 3),
        # One disk has all its files of the step, the other has not: the step does not exist.
        ("commit.manifest", 1, ([2, 1], [2, 1]), 2),
        ("commit.pointer", 1, ([3, 2, 1], [3, 2, 1]), 3),
    ],
)
def test_a_kill_between_the_disks(tmp_path, event, victim, left, resumed_step):
    # Promise 1.
    outcomes = on_ranks(tmp_path, 2, kill_in_a_save, tmp_path, event, victim)
    assert outcomes[victim] == "died"
    assert tuple(published(on_node(tmp_path, node)) for node in (0, 1)) == left
    survivor = outcomes[1 - victim]
    after = run_thread_ranks(2, resume, tmp_path, [1, 0])
    assert [outcome[1]["driver"]["step"] for outcome in after] == [resumed_step] * 2
    assert equal_bits(after[1 - victim][1], survivor["state"]) == (resumed_step == KILLED_AT)
    for node in (0, 1):
        run_dir = on_node(tmp_path, node).run_dir
        assert published(on_node(tmp_path, node)) == list(range(resumed_step, 0, -1))
        assert not [*run_dir.glob(".tmp-*"), *set_aside_dirs(run_dir, "incomplete")]


@pytest.mark.parametrize("harmed", [0, 1])
def test_a_damaged_manifest_costs_no_part_of_an_interrupted_commit(tmp_path, harmed):
    """A kill between the renames of two disks, then damage of one byte of either manifest."""
    run_thread_ranks(2, save, tmp_path, [0, 1], 2)
    first, second = (step_dir(on_node(tmp_path, node).run_dir, 2) for node in (0, 1))
    second = second.rename(second.with_name(publication.temporary_name(2)))
    flip_bit((first, second)[harmed] / MANIFEST, 9000)
    files = files_of(second)
    assert [step for step, _ in run_thread_ranks(2, resume_and_listen, tmp_path, [0, 1])] == [1, 1]
    [kept] = set_aside_dirs(on_node(tmp_path, 1).run_dir, "incomplete")
    assert files_of(kept) == files


def lose_parts(tmp_path: Path, node: int, *steps: int) -> None:
    for step in steps:
        shutil.rmtree(step_dir(on_node(tmp_path, node).run_dir, step))


def resume_and_listen(rank: int, tmp_path: Path, nodes: list[int]) -> tuple[int | str, list[str]]:
    """Return the step of the ranks or the error, and the log."""
    logged = messages()
    try:
        return resume(rank, tmp_path, nodes)[1]["driver"]["step"], logged
    except UserError as error:
        return str(error), logged


def test_a_lost_disk(tmp_path):
    saved = run_thread_ranks(2, save, tmp_path, [0, 1], 3)
    kept = shutil.copytree(on_node(tmp_path, 1).run_dir, tmp_path / "kept")
    # The newest steps are lost: the newest complete step is loaded, and the log lists the missing files.
    lose_parts(tmp_path, 1, 2, 3)
    outcomes = run_thread_ranks(2, resume_and_listen, tmp_path, [0, 1])
    assert [outcome[0] for outcome in outcomes] == [1, 1]
    [message, *_] = [text for text in outcomes[0][1] if "global_step_3" in text]
    assert "is not complete: no node's disk has" in message
    assert "actor/model/rank_00001.safetensors" in message
    run_dir = on_node(tmp_path, 0).run_dir
    assert [path.name for path in set_aside_dirs(run_dir, "incomplete")] == [
        "global_step_2.incomplete-1",
        "global_step_3.incomplete-1",
    ]
    # Everything is lost: an error, and no change.
    shutil.rmtree(on_node(tmp_path, 1).run_dir)
    before = files_of(run_dir)
    for text, _ in run_thread_ranks(2, resume_and_listen, tmp_path, [0, 1]):
        assert "No checkpoint in" in text
        assert "global_step_1 is not complete" in text
        assert "rng/rank_00001.safetensors" in text
        assert "step 0 by itself" in text
        assert "trainer.overwrite=true" in text
    assert files_of(run_dir) - before <= {"run.json"}
    # The disk is found again, in another machine.
    shutil.rmtree(on_node(tmp_path, 1).run_dir, ignore_errors=True)
    for step in (2, 3):
        (run_dir / f"global_step_{step}.incomplete-1").rename(step_dir(run_dir, step))
    shutil.copytree(kept, on_node(tmp_path, 2).run_dir)
    outcomes = run_thread_ranks(2, resume, tmp_path, [2, 0])
    assert [equal_bits(outcome[1], saved[rank]) for rank, outcome in enumerate(outcomes)] == [True, True]


def test_damage_on_one_disk_makes_all_nodes_fall_back(tmp_path):
    # Promise 6.
    run_thread_ranks(2, save, tmp_path, [0, 1], 3)
    # Damage a file of step 3 that is fetched after the swap, and the manifest of step 2.
    flip_bit(step_dir(on_node(tmp_path, 1).run_dir, 3) / "actor/optimizer/rank_00001.safetensors", 9000)
    flip_bit(step_dir(on_node(tmp_path, 0).run_dir, 2) / "manifest.json", 9000)
    outcomes = run_thread_ranks(2, resume_and_listen, tmp_path, [1, 0])
    assert [outcome[0] for outcome in outcomes] == [1, 1]
    assert any("actor/optimizer/rank_00001.safetensors: content differs" in text for text in outcomes[0][1])
    for node in (0, 1):
        run_dir = on_node(tmp_path, node).run_dir
        assert [path.name for path in set_aside_dirs(run_dir, "damaged")] == ["global_step_3.damaged-1"]
        assert published(on_node(tmp_path, node)) == [1]
        assert not [*run_dir.glob(".tmp-*")]


def fail_on_one(rank: int, tmp_path: Path, where: str) -> tuple[str, bool, list[str], dict]:
    """A save fails on the disk of rank 1 only. The same run then saves the next step."""
    config = on_node(tmp_path, rank, behind=where != "begin")
    config.checkpoint.on_save_error = "stop"
    run = start(rank, config)
    run.checkpointer.save(run.step())
    run.checkpointer.finish()

    def failing(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(config.run_dir))

    run.step()
    with ExitStack() as broken:
        if rank == 1 and where == "room":
            full = type("Full", (), {"f_bavail": 0, "f_frsize": 4096, "f_blocks": 1})()
            broken.enter_context(replaced(os, "statvfs", lambda path: full))
        elif rank == 1 and where == "sync":
            named = step_dir(config.run_dir, 2)
            real = files.fsync_dir
            lame = lambda path: failing() if path == config.run_dir and named.exists() else real(path)  # noqa: E731
            for module in (files, publication):
                broken.enter_context(replaced(module, "fsync_dir", lame))
        elif rank == 1:
            module, name = {
                "begin": (save_pending, "_link_folder"),
                "manifest": (publication, "_seal"),
                "rename": (publication, "_rename_final"),
            }[where]
            broken.enter_context(replaced(module, name, failing))
        try:
            run.checkpointer.save(run.driver.step)
            run.checkpointer.finish()
            raise AssertionError("the save did not fail")
        except (SaveFailed, UserError) as error:
            text, user = str(error), isinstance(error, UserError)
    left = sorted(path.name for path in config.run_dir.iterdir() if "global_step_2" in path.name)
    run.checkpointer.save(run.step())
    run.checkpointer.finish()
    return text, user, left, run.everything()


@pytest.mark.parametrize("where", ["begin", "room", "manifest", "rename", "sync"])
def test_a_save_error_on_one_disk_is_raised_everywhere_and_leaves_nothing(tmp_path, where):
    # Promise 8.
    outcomes = run_thread_ranks(2, fail_on_one, tmp_path, where)
    for text, user, left, _ in outcomes:
        assert "The checkpoint of step 2" in text
        assert "earlier checkpoints are intact" in text
        assert user == (where == "room")
        assert left == []
    assert "node_1" in outcomes[0][0]
    assert [published(on_node(tmp_path, node)) for node in (0, 1)] == [[3, 1]] * 2
    after = run_thread_ranks(2, resume, tmp_path, [1, 0])
    assert [equal_bits(outcome[1], outcomes[rank][3]) for rank, outcome in enumerate(after)] == [True, True]


def resume_onto_a_full_disk(rank: int, tmp_path: Path) -> str:
    """After a swap of disks, rank 1's disk cannot store fetched blocks."""
    run = start(rank, on_node(tmp_path, 1 - rank))

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with (
        replaced(os, "pwrite", full) if rank == 1 else nullcontext(),
        pytest.raises(OSError, match="No space left on device") as failed,
    ):
        run.checkpointer.resume()
    return str(failed.value)


def test_a_full_disk_for_fetched_parts_is_an_error_on_all_ranks(tmp_path):
    run_thread_ranks(2, save, tmp_path, [0, 1], 2)
    for text in run_thread_ranks(2, resume_onto_a_full_disk, tmp_path):
        assert ".tmp-fetched-global_step_2" in text
    # The full disk is at fault, so no checkpoint is set aside.
    assert [published(on_node(tmp_path, node)) for node in (0, 1)] == [[2, 1]] * 2
    assert not [path for node in (0, 1) for path in on_node(tmp_path, node).run_dir.glob(".tmp-*")]


def test_parts_of_another_run_are_ignored(tmp_path):
    run_thread_ranks(2, save, tmp_path, [0, 1], 2)
    (tmp_path / "other").mkdir()
    run_thread_ranks(2, save, tmp_path / "other", [0, 1], 2)
    step = step_dir(on_node(tmp_path, 1).run_dir, 2)
    shutil.rmtree(step)
    shutil.copytree(step_dir(on_node(tmp_path / "other", 1).run_dir, 2), step)
    outcomes = run_thread_ranks(2, resume_and_listen, tmp_path, [0, 1])
    assert [outcome[0] for outcome in outcomes] == [1, 1]
    assert any("global_step_2 is not complete" in text for text in outcomes[0][1])


def retire_on_two(rank: int, tmp_path: Path, silent: bool) -> list[int | None]:
    """Apply retention after the save of step 6 on two disks. With `silent`, rank 1's disk cannot be listed."""
    run_dir, coordinator, deleter = on_node(tmp_path, rank).run_dir, make_coordinator(), Deleter()
    coordinator.domains = [0, 1]

    def fail(*_: object) -> NoReturn:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with replaced(retention, "scan", fail) if silent and rank == 1 else nullcontext():
        retention.retire(run_dir, CheckpointConfig(max_to_keep=1, keep_best=1), 6, deleter, coordinator)
    assert deleter.wait(30)
    return steps(run_dir)


@pytest.mark.parametrize(("silent", "left"), [(False, [4, 6]), (True, [2, 4, 6])])
def test_a_checkpoint_that_one_disk_keeps_stays_on_all_disks(tmp_path, silent, left):
    """If one disk's rules may keep a checkpoint, the other disk keeps its files of the checkpoint too."""
    for node in (0, 1):
        for step in (2, 4, 6):
            publish(on_node(tmp_path, node).run_dir, step, {"val/accuracy": step / 10})
    flip_bit(step_dir(on_node(tmp_path, 1).run_dir, 4) / MANIFEST, 100)
    assert run_thread_ranks(2, retire_on_two, tmp_path, silent) == [left, left]


def make_room_on_two(rank: int, tmp_path: Path, needed: list[int]) -> tuple[str | None, list[int | None]]:
    """Free space for a save of step 8 that needs `needed[rank]` bytes on the disk of each rank."""
    run_dir, coordinator, deleter = on_node(tmp_path, rank).run_dir, make_coordinator(), Deleter()
    coordinator.domains = [0, 1]
    may_go = partial(retention.victims, run_dir, CheckpointConfig(max_to_keep=1), 8, coordinator, {})
    error_message = None
    try:
        make_room(run_dir, needed[rank], may_go, deleter, 30.0, coordinator)
    except OSError as error:
        error_message = str(error)
    assert deleter.wait(30)
    return error_message, steps(run_dir)


def publish_parts(tmp_path: Path, step: int) -> None:
    run_thread_ranks(2, publish_on_two, tmp_path, step)


def publish_on_two(rank: int, tmp_path: Path, step: int) -> None:
    coordinator = make_coordinator()
    coordinator.domains = [0, 1]
    publish_part(on_node(tmp_path, rank).run_dir, step, coordinator, nbytes=2 * MIB)


@pytest.mark.parametrize("harm", ["flip", "flip manifest", "remove"])
def test_the_newest_checkpoint_intact_on_all_disks_is_never_removed_for_space(tmp_path, harm):
    """Step 6 is intact on the full disk and damaged on the other, so step 4 is the newest intact step."""
    with small_disk(tmp_path / "node_0", 12), small_disk(tmp_path / "node_1", 64):
        for step in (2, 4, 6):
            publish_parts(tmp_path, step)
        part = step_dir(on_node(tmp_path, 1).run_dir, 6)
        if harm == "remove":
            shutil.rmtree(part)
        else:
            flip_bit(part / (MANIFEST if harm == "flip manifest" else "actor/model/rank_00001"), 900)
        here = [2, 4, 6] if harm != "remove" else [2, 4]
        # 9 MiB is more than removing step 2 would free: the save fails on both disks, and both keep everything.
        for error_message, left in run_thread_ranks(2, make_room_on_two, tmp_path, [9 * MIB, 0]):
            assert "removing global_step_2, which retention allows, would free only 2" in str(error_message)
            assert left in (here, [2, 4, 6])
        # Both disks remove the same steps, although one has enough space.
        outcomes = run_thread_ranks(2, make_room_on_two, tmp_path, [7 * MIB, 0])
        assert outcomes == [(None, [4, 6]), (None, [step for step in here if step != 2])]
