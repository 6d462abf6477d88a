"""Several ranks start on an empty disk: they share the remote checkpoint's download, which has no overall deadline."""

import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest

from rlhf.checkpoint.remote import download
from rlhf.errors import UserError
from rlhf.storage.layout import scan, step_dir
from tests.support.remotes import FAULTS, assert_same_files, copy_all, make_run, on_empty_disk
from tests.support.sections import remote_store, restore
from tests.support.thread_ranks import make_coordinator, run_thread_ranks, this_rank
from tests.support.verified import verify


@pytest.fixture(autouse=True)
def reset_faults():
    FAULTS.__init__()
    yield FAULTS
    FAULTS.__init__()


@pytest.fixture
def url(tmp_path) -> str:
    return f"faulty://{tmp_path}/remote"


FETCHED: dict[int | None, set[str]] = {}
"""Names of the files that each rank has opened in the remote."""
LOCK = threading.Lock()


def start(rank: int, config, timeout_s: float) -> object:
    """Return the restored step, or the text of the error."""
    coordinator = make_coordinator().duplicate(timedelta(seconds=timeout_s))
    store = remote_store(config) if rank == 0 else None
    try:
        return restore(store, config, None, coordinator)
    except UserError as error:
        return str(error)


def note(number: int, call: str, path: str) -> None:
    """Note the file that a call opens, under the rank of the call's thread."""
    if call == "open rb":
        with LOCK:
            FETCHED.setdefault(this_rank(), set()).add(Path(path).name)


@pytest.fixture
def config(tmp_path, url):
    config = make_run(tmp_path / "a", 2, 4, remote=url)
    copy_all(config)
    FETCHED.clear()
    return config


def test_ranks_share_the_files_and_no_deadline_is_for_all_of_them(tmp_path, config):
    """Earlier, the leader fetched all files, while the other ranks waited in a call with a deadline."""
    other = on_empty_disk(config, tmp_path / "b")

    def slowly(number: int, call: str, path: str) -> None:
        note(number, call, path)
        if call == "open rb" and "/rng/" in path:
            time.sleep(4.0)

    FAULTS.before = slowly
    assert run_thread_ranks(3, start, other, 2.5) == [4] * 3
    assert_same_files(step_dir(config.run_dir, 4), step_dir(other.run_dir, 4))
    files = [FETCHED[rank] - {"manifest.json"} for rank in range(3)]
    assert all(len(names) >= 2 for names in files)


def test_other_ranks_download_the_part_of_a_rank_without_access(tmp_path, config, monkeypatch):
    other = on_empty_disk(config, tmp_path / "b")
    monkeypatch.setattr(download, "CHECK_S", 0.2)

    def fail(number: int, call: str, path: str) -> None:
        note(number, call, path)
        if this_rank() == 1:
            raise PermissionError("no credentials")

    FAULTS.before = fail
    assert run_thread_ranks(3, start, other, 60.0) == [4] * 3
    assert FETCHED[1] == {"manifest.json"}
    verify(step_dir(other.run_dir, 4))


@pytest.mark.parametrize("what", ["damage", "silence"])
def test_damage_or_silence_seen_by_one_rank_reaches_all_ranks(tmp_path, config, monkeypatch, what):
    monkeypatch.setattr(download, "DOWNLOAD_S", 0.5)
    other = on_empty_disk(config, tmp_path / "b")
    if what == "damage":
        [path] = (tmp_path / "remote").rglob("global_step_4/rng/*.safetensors")
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        assert run_thread_ranks(3, start, other, 60.0) == [2] * 3
        assert [path.name for path in scan(other.run_dir)] == ["global_step_2"]
    else:

        def silent(number: int, call: str, path: str) -> None:
            if this_rank() == 2 and path.endswith(".safetensors"):
                raise ConnectionError("no route to host")

        FAULTS.before = silent
        messages = set(run_thread_ranks(3, start, other, 60.0))
        assert len(messages) == 1
        assert "cannot be read, but may have checkpoints of this run" in messages.pop()
        assert scan(other.run_dir) == []
    assert not list(other.run_dir.glob(".tmp-*"))
