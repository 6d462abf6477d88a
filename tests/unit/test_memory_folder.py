"""The folder of a run's snapshots in memory: whose it is, who may remove it, and how much room it has."""

import os
import threading
from pathlib import Path

import pytest

from rlhf.config.rules.validate import validate
from rlhf.errors import UserError
from rlhf.planning.check import check_snapshots, plan_of
from rlhf.ranks import memory_folder as module
from rlhf.ranks.memory_folder import (
    LEASE,
    check_room,
    folders_of,
    lease,
    make_folder,
    memory_folder,
    remove_abandoned,
)
from tests.support.checkpoints import make_config
from tests.support.in_memory import memory_base
from tests.support.small_disks import small_disk


@pytest.fixture
def base():
    with memory_base() as folder:
        yield folder


def dead(base: Path, run_dir: Path, run_id: str) -> Path:
    """A folder with a snapshot, whose run was killed."""
    folder = memory_folder(base, run_dir, run_id)
    with lease(folder):
        (folder / "global_step_1").mkdir()
    return folder


def age(folder: Path, seconds: float) -> None:
    for path in (folder / LEASE, folder):
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime - seconds))


def test_a_folder_is_private_and_of_one_run(base, tmp_path):
    folder = memory_folder(base, tmp_path / "a", "r")
    make_folder(folder)
    make_folder(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    others = {memory_folder(base, tmp_path / "b", "r"), memory_folder(base, tmp_path / "a", "s")}
    assert len(others | {folder}) == 3
    assert folders_of(base, tmp_path / "a") == [folder]
    folder.chmod(0o755)
    assert folders_of(base, tmp_path / "a") == []
    with pytest.raises(UserError, match=r"others may enter it"):
        make_folder(folder)
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(UserError, match=r"belongs to another user"):
        make_folder(folder)


def test_a_disk_and_a_missing_folder_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MOUNTS", tmp_path / "mounts")
    (tmp_path / "mounts").write_text(f"overlay / overlay rw 0 0\ntmpfs {tmp_path}/memory tmpfs rw 0 0\n")
    with pytest.raises(UserError, match=r"checkpoint\.memory\.dir=.* is on a disk \(overlay\)"):
        make_folder(memory_folder(tmp_path, tmp_path, "r"))
    (tmp_path / "memory").mkdir()
    make_folder(memory_folder(tmp_path / "memory", tmp_path, "r"))
    with pytest.raises(UserError, match=r"does not exist"):
        make_folder(memory_folder(tmp_path / "gone", tmp_path, "r"))


def test_the_end_of_a_lease_keeps_snapshots_only(base, tmp_path):
    folder = memory_folder(base, tmp_path, "r")
    with lease(folder):
        assert folder.is_dir()
    assert not folder.exists()
    assert dead(base, tmp_path, "r").is_dir()


def test_a_start_removes_dead_folders_and_never_a_living_runs(base, tmp_path):
    own, other = tmp_path / "own", tmp_path / "other"
    earlier, mine, recent, old = (
        dead(base, *run) for run in ((own, "1"), (own, "2"), (other, "1"), (tmp_path / "old", "1"))
    )
    living = memory_folder(base, tmp_path / "living", "1")
    age(old, module.LEASE_S + 1)
    there, leave = threading.Event(), threading.Event()

    def live() -> None:
        with lease(living):
            (living / "global_step_1").mkdir()
            age(living, 10 * module.LEASE_S)
            there.set()
            leave.wait(60)

    thread = threading.Thread(target=live)
    thread.start()
    assert there.wait(60)
    remove_abandoned(base, own, keep=mine)
    assert [path.exists() for path in (earlier, mine, recent, old, living)] == [False, True, True, False, True]
    leave.set()
    thread.join()
    remove_abandoned(base, own, keep=mine)
    assert not living.exists()


def test_room_counts_what_this_run_has_there(tmp_path):
    with small_disk(tmp_path / "memory", 4) as small:
        folder = dead(small, tmp_path, "r")
        (folder / "global_step_1" / "x").write_bytes(bytes(2 << 20))
        check_room(str(small), tmp_path, 3 << 20)
        with pytest.raises(UserError, match=r"need 5\.0 MiB, .* Enlarge the tmpfs"):
            check_room(str(small), tmp_path, 5 << 20)
        with pytest.raises(UserError):
            check_room(str(small), tmp_path / "another", 3 << 20)


def test_the_plan_counts_snapshots_and_refuses_before_a_start(tmp_path):
    config = make_config(tmp_path)
    _, without = plan_of(config)
    assert without.checkpoint.snapshot == 0
    config.checkpoint.memory.freq = 1
    _, plan = plan_of(config)
    assert plan.checkpoint.snapshot == sum(plan.checkpoint.by_part[name] for name in ("actor/model", "actor/optimizer"))
    assert plan.peak.items["snapshots in memory"] == 4 * plan.checkpoint.snapshot
    with small_disk(tmp_path / "memory", 4) as small:
        config.checkpoint.memory.dir = str(small)
        with pytest.raises(UserError, match=r"checkpoint\.memory\.dir"):
            check_snapshots(config, plan)


def test_the_folder_has_no_effect_without_snapshots(tmp_path):
    config = make_config(tmp_path)
    config.checkpoint.memory.dir = "/run"
    with pytest.raises(UserError, match=r"checkpoint\.memory\.dir=/run.*checkpoint\.memory\.freq=1"):
        validate(config)
    config.checkpoint.memory.freq, config.checkpoint.memory.dir = 1, "relative"
    with pytest.raises(UserError, match=r"must be an absolute path"):
        validate(config)
