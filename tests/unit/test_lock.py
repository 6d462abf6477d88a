import fcntl
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from rlhf.errors import UserError
from rlhf.ranks import lock
from rlhf.ranks.lock import run_lock, run_lock_together, wait_for_ranks
from tests.support.thread_ranks import make_coordinator, run_thread_ranks

# Ends when its standard input is closed.
RANK = """
import sys
from pathlib import Path
from rlhf.ranks.lock import lock_as_rank
lock_as_rank(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_second_run_is_refused_with_the_holder_and_the_remedy(tmp_path):
    with run_lock(tmp_path):
        with pytest.raises(UserError) as refused, run_lock(tmp_path):
            pass
        for part in (str(tmp_path), f"process {os.getpid()} on", "trainer.experiment_name"):
            assert part in str(refused.value)
    with run_lock(tmp_path):  # free again
        pass


def test_a_lock_whose_holder_has_not_written_its_name_is_rejected_clearly(tmp_path):
    with run_lock(tmp_path):
        (tmp_path / "run.lock").write_text("")
        with pytest.raises(UserError, match="just started"), run_lock(tmp_path):
            pass


def test_a_lock_that_is_released_a_moment_later_is_taken(tmp_path):
    held = os.open(tmp_path / "run.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(held, fcntl.LOCK_EX)
    with ThreadPoolExecutor(1) as thread:
        released = thread.submit(lambda: (time.sleep(0.1), os.close(held)))
        with run_lock(tmp_path):
            released.result()


def test_a_lock_that_is_a_pipe_is_rejected_and_not_read(tmp_path):
    os.mkfifo(tmp_path / "run.lock")
    held = os.open(tmp_path / "run.lock", os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)
    try:
        with pytest.raises(OSError, match="is not a regular file"), run_lock(tmp_path):
            pass
    finally:
        os.close(held)


def lock_all(rank: int, folder: Path, nodes: list[int]) -> str:
    """Lock on a rank of a launch on the `nodes`; return the error, or "" if the launch gets the lock."""
    coordinator = make_coordinator()
    (folder / str(nodes[rank])).mkdir(exist_ok=True)
    try:
        with run_lock_together(folder / str(nodes[rank]), coordinator):
            coordinator.all_gather(None)
            with pytest.raises(UserError, match="Another run"), run_lock(folder / str(nodes[rank])):
                pass
            coordinator.all_gather(None)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("nodes", [[0] * 6, [0, 1, 0, 1], [2, 1, 1, 2, 2]])
def test_all_ranks_of_a_launch_share_its_locks_and_a_second_launch_gets_none(tmp_path, monkeypatch, nodes):
    monkeypatch.setattr(lock, "LOOK_AGAIN_S", 0.001)
    for _ in range(2):  # free again afterwards
        assert run_thread_ranks(len(nodes), lock_all, tmp_path, nodes) == [""] * len(nodes)
    taken = tmp_path / str(nodes[-1])
    with run_lock(taken):
        before = (taken / "run.lock").read_bytes()
        for message in run_thread_ranks(len(nodes), lock_all, tmp_path, nodes):
            assert f"Another run is writing into {taken}: process {os.getpid()} on" in message
        assert (taken / "run.lock").read_bytes() == before
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {"run.lock"}


def _leave_before(rank: int, last: int, folder: Path) -> bool:
    """Unlock before the rank `last` does. On rank `last`, return whether the directory is still locked then."""
    coordinator = make_coordinator()
    refused = False
    with run_lock_together(folder, coordinator):
        if coordinator.rank == last:
            coordinator.all_gather(None)
            with suppress(UserError), run_lock(folder):
                return False
            refused = True
    if coordinator.rank != last:
        coordinator.all_gather(None)
    return refused


@pytest.mark.parametrize("last", range(3))
def test_a_launch_holds_the_directory_until_its_last_rank_leaves(tmp_path, last):
    assert run_thread_ranks(3, _leave_before, last, tmp_path) == [rank == last for rank in range(3)]
    with run_lock(tmp_path):  # free again
        pass


@pytest.fixture
def rank(tmp_path):
    processes = []

    def start() -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-c", RANK, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        processes.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_start_waits_for_every_rank_of_a_predecessor(tmp_path, rank):
    first, second = rank(), rank()
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(wait_for_ranks, tmp_path)
        first.communicate()
        with pytest.raises(TimeoutError):
            waiting.result(0.3)
        second.communicate()
        waiting.result(60)


def test_ranks_that_stay_are_an_error_after_the_deadline(tmp_path, rank):
    rank()
    with pytest.raises(UserError, match=f"{tmp_path}.*still alive after 0.2 s"):
        wait_for_ranks(tmp_path, deadline_s=0.2)
