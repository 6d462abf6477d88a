"""Kills, and a remote that fails, hangs or disappears: no local loss, and no partial copy looks complete."""

import errno
import re
import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest

from rlhf.checkpoint.remote import copies as copies_module
from rlhf.checkpoint.remote import remote_start
from rlhf.checkpoint.remote.lease import LEASE
from rlhf.config import Config
from rlhf.errors import UserError
from rlhf.storage.layout import MANIFEST, UPLOAD, scan, step_dir
from tests.support.checkpoints import run_ranks
from tests.support.published import eventually
from tests.support.remotes import (
    DEADLINE_S,
    FAULTS,
    assert_same_files,
    complete_steps,
    copy_all,
    make_run,
    on_empty_disk,
    save,
    start_from_remote,
)
from tests.support.sections import open_remote, remote_copies, remote_store, restore
from tests.support.verified import verify

pytestmark = pytest.mark.usefixtures("quick_retries")


@pytest.fixture
def url(tmp_path) -> str:
    return f"faulty://{tmp_path}/remote"


def there(tmp_path: Path, step: int) -> Path:
    return tmp_path / "remote/rlhf/default" / f"global_step_{step}"


def assert_intact(config: Config, tmp_path: Path, *steps: int) -> None:
    """Check that the remote has exactly these steps, each equal to the local checkpoint."""
    assert complete_steps(config) == remote_store(config).steps() == list(steps)
    for step in steps:
        verify(there(tmp_path, step))
        assert (there(tmp_path, step) / MANIFEST).read_bytes() == (
            step_dir(config.run_dir, step) / MANIFEST
        ).read_bytes()


# A file needs three calls: open, write, size.
@pytest.mark.parametrize("k", [4, 5, 7, 11])
def test_copies_succeed_although_every_kth_call_fails(tmp_path, url, k):
    config = make_run(tmp_path / "a", 2, 4, 6, remote=url)
    config.checkpoint.remote_max_to_keep = 2
    FAULTS.fail_every(k)
    copies = remote_copies(config)
    copies.start()
    assert copies.finish(DEADLINE_S) == []
    assert copies.metrics()["perf/remote_failures"] >= 5
    other = on_empty_disk(config, tmp_path / "b")
    store = remote_store(other)
    assert restore(store, other, None) == 6
    FAULTS.__init__()
    assert_intact(config, tmp_path, 6, 4)
    assert_same_files(step_dir(config.run_dir, 6), step_dir(other.run_dir, 6))


def test_a_remote_that_dies_for_a_while(tmp_path, url, caplog):
    """The remote disappears in the middle of a file while training saves. After its return it gets all checkpoints
    that retention keeps."""
    config = make_run(tmp_path / "a", 2, remote=url)
    config.checkpoint.max_to_keep = 2
    away = threading.Event()

    def before(number: int, call: str, path: str) -> None:
        if call == "write" and "actor/model" in path:
            away.set()
        if away.is_set() and not back.is_set():
            raise ConnectionError("no route to host")

    back = threading.Event()
    FAULTS.before = before
    copies = remote_copies(config)
    copies.start()
    assert away.wait(DEADLINE_S)
    for step in (4, 6, 8):
        save(config, step)
        copies.published(step_dir(config.run_dir, step))
    eventually(lambda: "(5 in a row)" in caplog.text)
    assert copies.metrics()["perf/remote_pending"] == 4
    # Retention went on while the remote was away, and every local checkpoint is complete.
    assert [verify(path).step for path in scan(config.run_dir)] == [8, 6]
    rows = [int(n) for n in re.findall(r"failed \((\d+) in a row\)", caplog.text)]
    # A call in progress when the remote disappeared may have succeeded and restarted the count.
    since = len(rows) - 1 - rows[::-1].index(1)
    assert rows[since:] == list(range(1, len(rows) - since + 1)), (
        "one line for each wait, whatever the number of threads"
    )
    assert copies.metrics()["perf/remote_failures"] >= len(rows)

    back.set()
    assert copies.finish(DEADLINE_S) == []
    # Step 2 was in progress and is kept by its links. Step 4 was removed before its copy began.
    assert complete_steps(config) == [8, 6, 2]
    for step in (8, 6, 2):
        verify(there(tmp_path, step))
    assert not list(config.run_dir.glob(f"{UPLOAD}*"))


def test_the_end_of_the_training_does_not_wait_for_a_dead_remote(tmp_path, url, caplog):
    config = make_run(tmp_path / "a", 2, 4, remote=url)

    def before(number: int, call: str, path: str) -> None:
        raise ConnectionError("no route to host")

    FAULTS.before = before
    started = time.monotonic()
    assert copy_all(config, deadline_s=0.5) == [4, 2]
    assert time.monotonic() - started < 60
    assert "Not copied to" in caplog.text
    assert "global_step_4, global_step_2. The next start copies the rest." in caplog.text
    FAULTS.__init__()
    assert copy_all(config) == []
    assert_intact(config, tmp_path, 4, 2)


def test_a_connection_that_hangs(tmp_path, url, caplog, monkeypatch):
    """A hung call does not delay the end of the process, and delays the copies only for STALLED_S."""
    config = make_run(tmp_path / "a", 2, remote=url)
    release = threading.Event()

    def hang_once(number: int, call: str, path: str) -> None:
        if call == "write" and "actor/model" in path and not hung.is_set():
            hung.set()
            release.wait(60)
            raise ConnectionError("the hung call ends at last")

    hung = threading.Event()
    FAULTS.before = hang_once
    started = time.monotonic()
    assert copy_all(config, deadline_s=1.0) == [2]
    assert hung.is_set()
    assert time.monotonic() - started < 60

    hung.clear()
    monkeypatch.setattr(copies_module, "STALLED_S", 0.5)
    assert copy_all(config) == []
    assert hung.is_set()
    assert "no progress for 0.5 s" in caplog.text
    assert_intact(config, tmp_path, 2)
    release.set()


def test_an_unreachable_remote_fails_only_starts_on_an_empty_disk(tmp_path, url, monkeypatch, caplog):
    monkeypatch.setattr(remote_start, "CHECK_S", 0.2)
    monkeypatch.setattr(remote_start, "DOWNLOAD_S", 0.2)
    config = make_run(tmp_path / "a", 2, remote=url)
    other = on_empty_disk(config, tmp_path / "b")
    copy_all(config)

    def before(number: int, call: str, path: str) -> None:
        raise ConnectionError("no route to host")

    FAULTS.before = before
    assert open_remote(config) is None
    assert "does not answer" in caplog.text
    # On an empty disk, the remote's content decides at which step the run begins, so the start fails.
    with pytest.raises(UserError, match="a small file cannot be written"):
        open_remote(other)
    FAULTS.__init__()
    store = open_remote(other)
    assert store is not None
    FAULTS.before = before
    with pytest.raises(UserError, match="cannot be read, but may have checkpoints of this run"):
        restore(store, other, None)
    assert scan(other.run_dir) == []


def test_listing_that_fails_is_not_an_empty_folder(tmp_path, url):
    config = make_run(tmp_path / "a", 2, remote=url)
    copy_all(config)
    FAULTS.fail_every(1)
    with pytest.raises(OSError, match="asked for by the test"):
        remote_store(config).steps()
    with pytest.raises(OSError, match="asked for by the test"):
        remote_store(config).copy(2)


def test_a_full_disk_during_a_download_is_an_error_and_leaves_nothing(tmp_path, url):
    config = make_run(tmp_path / "a", 2, remote=url)
    copy_all(config)
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24k", "tmpfs", disk], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        other = on_empty_disk(config, disk)
        with pytest.raises(UserError, match="No space left on device"):
            start_from_remote(other)
        assert list(other.run_dir.iterdir()) == []
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def copy_and_die(rank: int, config: Config, n: int, keep: int | None) -> int:
    """Start the copies and kill them at the `n`th call. Return the number of calls if fewer than `n`."""
    config.checkpoint.remote_max_to_keep = keep
    FAULTS.kill_at(n)
    assert copy_all(config) == []
    return len(FAULTS.calls)


@pytest.mark.slow
def test_killed_at_every_call_of_a_copy(tmp_path, url):
    """After a kill at any call, a copy that looks complete is complete, the old copy stays until the new one is
    complete, and the next start finishes the copies."""
    config = make_run(tmp_path / "a", 2, remote=url)
    copy_all(config)
    save(config, 4)
    shutil.copytree(tmp_path / "remote", tmp_path / "before")
    seen: set[tuple[int, ...]] = set()
    total = run_ranks(1, copy_and_die, config, 10**9, 1, deadline_s=DEADLINE_S, join=tmp_path / "join")[0]
    for n in range(1, total + 1, 2):  # every second call is enough: both copies are complete during two calls
        shutil.rmtree(tmp_path / "remote")
        shutil.copytree(tmp_path / "before", tmp_path / "remote")
        outcome = run_ranks(1, copy_and_die, config, n, 1, deadline_s=DEADLINE_S, join=tmp_path / f"join_{n}")
        assert outcome == ["died"]
        for lease in (tmp_path / "remote").rglob(LEASE):
            if not lease.stat().st_size:  # a lease killed during its write has no holder, and the start waits
                lease.unlink()
        left = complete_steps(config)
        seen.add(tuple(left))
        assert left, "at some call no complete copy was left"
        for step in left:
            verify(there(tmp_path, step))
        assert [verify(path).step for path in scan(config.run_dir)] == [4, 2]
        config.checkpoint.remote_max_to_keep = 1
        assert copy_all(config) == []
        assert_intact(config, tmp_path, 4)
        assert not list(config.run_dir.glob(f"{UPLOAD}*"))
    assert seen == {(2,), (4, 2), (4,)}


def restore_and_die(rank: int, config: Config, n: int) -> int:
    FAULTS.kill_at(n)
    start_from_remote(config)
    return len(FAULTS.calls)


@pytest.mark.slow
def test_killed_while_fetching(tmp_path, url):
    """A start that is killed at any call of a download leaves no checkpoint. The next start fetches the whole
    checkpoint."""
    config = make_run(tmp_path / "a", 2, 4, remote=url)
    copy_all(config)
    total = run_ranks(
        1, restore_and_die, on_empty_disk(config, tmp_path / "z"), 10**9, deadline_s=DEADLINE_S, join=tmp_path / "join"
    )[0]
    for n in range(1, total, 5):
        other = on_empty_disk(config, tmp_path / f"disk_{n}")
        outcome = run_ranks(1, restore_and_die, other, n, deadline_s=DEADLINE_S, join=tmp_path / f"join_{n}")
        assert outcome == ["died"]
        assert scan(other.run_dir) == [] or verify(step_dir(other.run_dir, 4))
        start_from_remote(other)
        assert_same_files(step_dir(config.run_dir, 4), step_dir(other.run_dir, 4))


def test_a_permission_error_of_the_remote_is_not_retried(tmp_path, url):
    config = make_run(tmp_path / "a", 2, remote=url)

    def before(number: int, call: str, path: str) -> None:
        raise PermissionError(errno.EACCES, "Forbidden", path)

    FAULTS.before = before
    with pytest.raises(UserError, match="Forbidden"):
        open_remote(config)
    assert len(FAULTS.calls) == 1
