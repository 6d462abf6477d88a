"""Disks without space for the next save, one disk per test: which checkpoints a save removes first, which never, and
when it fails."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlhf.checkpoint.commit import removal, retention
from rlhf.checkpoint.commit.deleter import Deleter
from rlhf.checkpoint.save.disk_space import bytes_freed_by, make_room
from rlhf.config.schema.checkpoint import CheckpointConfig
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.transport import Transport
from rlhf.storage.files import remove
from rlhf.storage.layout import POINTER, TRASH, UPLOAD, step_dir
from tests.support.checkpoints import flip_bit, listening
from tests.support.published import publish, steps
from tests.support.small_disks import small_disk
from tests.support.verified import verify

MIB = 1 << 20
DEADLINE_S = 30.0
SINGLE_PROCESS = Coordinator(Transport())


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    """A file system of 16 MiB."""
    with small_disk(tmp_path / "disk", 16) as folder:
        yield folder


@pytest.fixture
def deleter() -> Iterator[Deleter]:
    deleter = Deleter()
    yield deleter
    assert deleter.wait(DEADLINE_S)


def free(disk: Path) -> int:
    stats = os.statvfs(disk)
    return stats.f_bavail * stats.f_frsize


def leave(disk: Path, room: int) -> None:
    """Write another program's file that leaves `room` bytes free."""
    (disk / "filler").write_bytes(bytes(free(disk) - room))
    assert room - 8192 <= free(disk) <= room


def after_the_save(run_dir: Path, step: int, **settings) -> Callable[[], list[Path]]:
    return lambda: retention.victims(run_dir, CheckpointConfig(**settings), step, SINGLE_PROCESS, {})


def removed_for(
    disk: Path,
    needed: int,
    victims: Callable[[], list[Path]],
    deleter: Deleter,
    cancel_copy: Callable[[], None] = lambda: None,
) -> list[int | None]:
    """Return the steps that were removed to free space."""
    before = steps(disk)
    make_room(disk, needed, victims, deleter, DEADLINE_S, SINGLE_PROCESS, cancel_copy)
    return [step for step in before if step not in steps(disk)]


def never() -> list[Path]:
    raise AssertionError("nothing is short")


def test_a_save_with_enough_space_removes_nothing(disk, deleter):
    publish(disk, 2, nbytes=MIB)
    assert removed_for(disk, 4 * MIB, never, deleter) == []


def test_checkpoints_outside_retention_are_removed_first_and_only_as_needed(disk, deleter, caplog):
    for step in (2, 4, 6, 8):
        publish(disk, step, nbytes=2 * MIB)
    leave(disk, MIB)
    assert removed_for(disk, 4 * MIB, after_the_save(disk, 10, max_to_keep=2), deleter) == [2, 4]
    assert free(disk) >= 4 * MIB
    assert steps(disk) == [6, 8]
    assert (disk / POINTER).read_text() == "8\n"
    assert "removing global_step_2, global_step_4 first, which retention would remove later" in caplog.text
    # Removing step 6 is enough, although retention also allows removing step 8. Step 8 is the newest.
    leave_less = free(disk) - MIB
    (disk / "more").write_bytes(bytes(leave_less))
    assert removed_for(disk, 2 * MIB, after_the_save(disk, 10, max_to_keep=1), deleter) == [6]
    assert steps(disk) == [8]
    publish(disk, 10, nbytes=2 * MIB)


def test_the_newest_intact_one_stays_whatever_retention_says(disk, deleter):
    # Promise 9.
    for step in (2, 4, 6):
        publish(disk, step, nbytes=2 * MIB)
    leave(disk, MIB)
    flip_bit(step_dir(disk, 6) / "actor/model/weights", 999)
    rule = after_the_save(disk, 8, max_to_keep=1)
    assert [path.name for path in rule()] == ["global_step_2", "global_step_4", "global_step_6"]
    # Step 6 is damaged, so a crash would resume from step 4.
    with pytest.raises(OSError, match=r"needs 4\.0 MiB and the disk has 1\.0 MiB free") as refused:
        removed_for(disk, 4 * MIB, rule, deleter)
    assert "; removing global_step_2, which retention allows, would free only 2.0 MiB" in str(refused.value)
    assert steps(disk) == [2, 4, 6]
    assert removed_for(disk, 3 * MIB - 8192, rule, deleter) == [2]
    assert steps(disk) == [4, 6]
    verify(step_dir(disk, 4))


def test_nothing_goes_when_no_checkpoint_is_intact(disk, deleter):
    # Promise 10.
    for step in (2, 4):
        publish(disk, step, nbytes=2 * MIB)
        flip_bit(step_dir(disk, step) / "actor/model/weights", 999)
    leave(disk, MIB)
    with pytest.raises(OSError, match="no checkpoint may be removed before the new one is complete"):
        removed_for(disk, 2 * MIB, after_the_save(disk, 6, max_to_keep=1), deleter)
    assert steps(disk) == [2, 4]


def test_checkpoints_of_keep_every_and_keep_best_are_not_removed_for_space(disk, deleter):
    for step, accuracy in ((2, 0.9), (4, 0.1), (6, 0.2), (8, 0.3)):
        publish(disk, step, {"val/accuracy": accuracy}, nbytes=2 * MIB)
    leave(disk, MIB)
    rule = after_the_save(disk, 10, max_to_keep=1, keep_best=1, keep_every=4)
    with pytest.raises(OSError, match="removing global_step_6, which retention allows, would free only 2"):
        removed_for(disk, 6 * MIB, rule, deleter)
    assert removed_for(disk, 2 * MIB, rule, deleter) == [6]
    assert steps(disk) == [2, 4, 8]


def test_a_save_waits_for_trash_instead_of_removing_more_checkpoints(disk):
    """The deleter is removing a large checkpoint. A save waits for the freed space and removes no other checkpoint."""
    for step in (2, 4, 6):
        publish(disk, step, nbytes=4 * MIB)
    leave(disk, MIB)
    deleter = Deleter()
    trash = removal.to_trash(step_dir(disk, 2))
    for number in range(2000):
        (trash / f"{number}").touch()
    assert free(disk) < 4 * MIB
    deleter.submit(trash)
    assert removed_for(disk, 4 * MIB, never, deleter) == []
    assert not trash.exists()
    assert steps(disk) == [4, 6]


def test_hard_linked_files_free_space_only_with_their_last_link(disk, deleter):
    for step in (2, 4, 6):
        publish(disk, step, nbytes=2 * MIB)
    for step in (4, 6):
        os.link(step_dir(disk, 2) / "actor/model/weights", step_dir(disk, step) / "shared")
    two, four, six = (step_dir(disk, step) for step in (2, 4, 6))
    assert bytes_freed_by([two]) < 8192
    assert 2 * MIB <= bytes_freed_by([two, four]) < 2 * MIB + 16384
    assert 6 * MIB <= bytes_freed_by([two, four, six]) < 6 * MIB + 32768
    archive = four.rename(disk / "archive")
    four.symlink_to(archive)
    assert bytes_freed_by([four]) == 0
    # Removing step 2 alone would not be enough, so nothing is removed.
    leave(disk, MIB)
    with pytest.raises(OSError, match=r"removing global_step_2, .* would free only 0\.0 MiB"):
        removed_for(disk, 2 * MIB, after_the_save(disk, 8, max_to_keep=3), deleter)
    assert two.exists()


def test_an_upload_of_a_removed_checkpoint_is_cancelled_to_free_space(disk, deleter):
    """Links of an upload keep the space of a removed checkpoint in use. Cancelling the upload frees it."""
    links = []
    for step in (2, 4, 6):
        publish(disk, step, nbytes=2 * MIB)
        links.append(disk / f"{UPLOAD}global_step_{step}-0123456789ab")
        links[-1].mkdir()
        os.link(step_dir(disk, step) / "actor/model/weights", links[-1] / "weights")

    def cancel_copy() -> None:
        for folder in links:
            if folder.exists() and not (disk / folder.name.split("-")[1]).exists():
                remove(folder)

    removal.discard(step_dir(disk, 2))
    leave(disk, MIB)
    assert removed_for(disk, 3 * MIB, never, deleter, cancel_copy) == []
    assert [folder.exists() for folder in links] == [False, True, True]
    rule = after_the_save(disk, 8, max_to_keep=1)
    assert removed_for(disk, 5 * MIB, rule, deleter, cancel_copy) == [4]
    assert [folder.exists() for folder in links] == [False, False, True]
    assert steps(disk) == [6]


def test_space_that_is_not_freed_is_an_error_with_current_figures(disk, deleter, monkeypatch):
    """A link keeps the removed file, as if another program took the freed space at once."""
    monkeypatch.setattr("rlhf.checkpoint.save.disk_space.SETTLE_S", 0.3)
    for step in (2, 4):
        publish(disk, step, nbytes=2 * MIB)
    leave(disk, MIB)

    def block(event: str) -> None:
        if event == "commit.trash":
            [trash] = disk.glob(f"{TRASH}*")
            os.link(trash / "actor/model/weights", disk / "held")

    refused = r"needs 2\.5 MiB and the disk has 1\.0 MiB free; no checkpoint may be removed before"
    with listening(block), pytest.raises(OSError, match=refused):
        removed_for(disk, 2 * MIB + MIB // 2, after_the_save(disk, 6, max_to_keep=1), deleter)
    assert steps(disk) == [4]


FILES = 20_000
KILLED_WHILE_IT_REAPS = """
    import os, signal, sys, time
    from pathlib import Path
    from rlhf.storage.layout import TRASH
    from rlhf.checkpoint.commit.deleter import Deleter
    from rlhf.checkpoint.commit.retention import retire
    from rlhf.config.schema.checkpoint import CheckpointConfig
    from rlhf.ranks.coordinator import Coordinator
    from rlhf.ranks.transport import Transport

    run_dir = Path(sys.argv[1])
    retire(run_dir, CheckpointConfig(max_to_keep=1), 4, Deleter(), Coordinator(Transport()))
    [trash] = run_dir.glob(f"{TRASH}*")
    while len(os.listdir(trash / "many")) == int(sys.argv[2]):
        time.sleep(0)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_in_the_middle_of_a_deletion_leaves_trash_for_the_next_start(tmp_path):
    old, new = publish(tmp_path, 2), publish(tmp_path, 4)
    (old / "many").mkdir()
    for number in range(FILES):
        (old / "many" / f"{number}").touch()
    program = [sys.executable, "-c", textwrap.dedent(KILLED_WHILE_IT_REAPS), str(tmp_path), str(FILES)]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=DEADLINE_S * 2, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    [trash] = tmp_path.glob(f"{TRASH}*")
    assert 0 < len(list((trash / "many").iterdir())) < FILES  # the kill hit in the middle of the deletion
    assert steps(tmp_path) == [4]
    assert removal.clean_leftovers(tmp_path) == [trash.name]
    assert {path.name for path in tmp_path.iterdir()} == {new.name, POINTER}
    verify(new)
