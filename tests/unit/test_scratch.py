"""Scratch folders: removed at the end or, after a kill, with the next folder; never removed from a live process."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from rlhf.storage import scratch as scratch_module
from rlhf.storage.files import write_folder
from rlhf.storage.scratch import LONGEST, SHARED_MEMORY, Scratch, set_shared_memory_prefix, sweep
from tests.support.small_disks import small_disk

HOLDER = """
import socket, sys
from multiprocessing import shared_memory
from rlhf.storage.scratch import Scratch, set_shared_memory_prefix
scratch = Scratch()
(scratch.folder / "sub").mkdir()
(scratch.folder / "sub" / "file").write_text("x")
listener = socket.socket(socket.AF_UNIX)
listener.bind(f"{scratch.folder}/{'u' * 36}")
set_shared_memory_prefix(f"{scratch.name}.")
memory = shared_memory.SharedMemory(create=True, size=16)
print(scratch.folder, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def where(tmp_path_factory, monkeypatch) -> Path:
    """Return a short path, because paths of sockets have a limit."""
    folder = Path(f"/tmp/{os.getpid()}-{os.urandom(3).hex()}")
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    yield folder
    for left in folder.iterdir():
        left.rmdir()
    folder.rmdir()


def shared(folder: Path) -> list[Path]:
    return list(SHARED_MEMORY.glob(f"*{folder.name}*"))


def holder() -> tuple["subprocess.Popen[str]", Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_a_scratch_folder_is_private_and_removed_at_the_end(where):
    with Scratch() as scratch:
        assert scratch.folder.parent == where
        assert scratch.folder.stat().st_mode & 0o777 == 0o700
        assert len(f"{scratch.folder}/{'u' * 36}") <= 107
        (scratch.folder / "file").touch()
        (SHARED_MEMORY / f"{scratch.name}.x").touch()
        assert len(shared(scratch.folder)) == 1
    assert not scratch.folder.exists()
    assert not shared(scratch.folder)
    scratch.close()


def test_the_next_scratch_folder_removes_those_of_dead_processes_only(where):
    killed, of_killed = holder()
    living, of_living = holder()
    assert shared(of_killed)
    assert shared(of_living)
    os.killpg(killed.pid, signal.SIGKILL)  # this also kills the process that would remove the shared memory
    killed.wait()
    assert len(list(of_killed.iterdir())) == 2
    assert shared(of_killed)
    with Scratch() as scratch:
        assert sorted(where.iterdir()) == sorted([of_living, scratch.folder])
        assert not shared(of_killed)
        assert len(list(of_living.iterdir())) == 2
        assert shared(of_living)
    os.killpg(living.pid, signal.SIGKILL)
    living.wait()
    sweep(where)
    assert not list(where.iterdir())
    assert not shared(of_living)


def test_other_names_links_and_other_users_stay(where, monkeypatch):
    kept = [where / "rlhf.0123", where / "rlhf-0123456789ab", where / "rlhf.model-files"]
    for folder in kept:
        folder.mkdir()
    link = where / "rlhf.0123456789ab"
    link.symlink_to(kept[0])
    others = where / "rlhf.abcdefabcdef"
    others.mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: others.stat().st_uid + 1)
        sweep(where)
    assert sorted(where.iterdir()) == sorted([*kept, link, others])
    sweep(where)
    assert sorted(where.iterdir()) == sorted([*kept, link])
    link.unlink()


def test_a_scratch_folder_removed_before_its_lock_is_created_again(where, monkeypatch):
    made, real = [], scratch_module.make_private_dir

    def make(path: Path) -> None:
        made.append(path)
        real(path)
        if len(made) == 1:
            path.rmdir()

    monkeypatch.setattr(scratch_module, "make_private_dir", make)
    with Scratch() as scratch:
        assert scratch.folder == made[1]
        assert scratch.folder.is_dir()


def test_a_file_system_without_locks_is_an_error_with_a_remedy(where, monkeypatch):
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    (where / "rlhf.0123456789ab").mkdir()
    with pytest.raises(OSError, match=f"{where} .*No locks available.*TMPDIR"):
        Scratch()
    assert [path.name for path in where.iterdir()] == ["rlhf.0123456789ab"]


def test_a_long_temporary_folder_is_not_for_sockets(tmp_path, monkeypatch):
    long = tmp_path / ("x" * LONGEST)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with Scratch() as scratch:
        assert scratch.folder.parent == Path("/tmp")


def test_shared_memory_names_have_the_prefix_of_the_scratch_folder():
    set_shared_memory_prefix("rlhf.0123456789ab.")
    try:
        memory = shared_memory.SharedMemory(create=True, size=16)
        assert memory.name.startswith("rlhf.0123456789ab.")
        memory.close()
        memory.unlink()
    finally:
        set_shared_memory_prefix()
    memory = shared_memory.SharedMemory(create=True, size=16)
    assert memory.name.startswith("psm_")
    memory.close()
    memory.unlink()


def test_a_folder_of_small_files_is_written_beside_what_cannot_be_removed(tmp_path):
    folder = tmp_path / "rollout_model"
    write_folder(folder, {"config.json": b"old", "gone.json": b"old"})
    with small_disk(folder / "busy", 1):
        write_folder(folder, {"config.json": b"new"})
    assert (folder / "config.json").read_bytes() == b"new"
    assert not (folder / "gone.json").exists()
