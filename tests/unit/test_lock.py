import os
import subprocess
import sys
import time

import pytest

from rlhf.errors import UserError
from rlhf.ranks.lock import run_lock, wait_for_ranks

RANK = """
import sys, time
from pathlib import Path
from rlhf.ranks.lock import hold_rank_lock
hold_rank_lock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(float(sys.argv[2]))
"""


def test_second_run_is_refused_with_the_holder_and_the_remedy(tmp_path):
    with run_lock(tmp_path):
        with pytest.raises(UserError) as refused, run_lock(tmp_path):
            pass
        for part in (str(tmp_path), f"process {os.getpid()} on", "trainer.experiment_name"):
            assert part in str(refused.value)
    with run_lock(tmp_path):  # free again
        pass


def test_a_holder_without_a_name_yet_is_still_a_clear_refusal(tmp_path):
    with run_lock(tmp_path):
        (tmp_path / "run.lock").write_text("")
        with pytest.raises(UserError, match="just started"), run_lock(tmp_path):
            pass


@pytest.fixture
def rank(tmp_path):
    processes = []

    def start(seconds: float) -> None:
        process = subprocess.Popen(
            [sys.executable, "-c", RANK, tmp_path, str(seconds)], stdout=subprocess.PIPE, text=True
        )
        processes.append(process)
        assert process.stdout.readline() == "held\n"

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_start_waits_for_every_rank_of_a_predecessor(tmp_path, rank):
    rank(0.4)
    rank(0.8)
    start = time.monotonic()
    wait_for_ranks(tmp_path)
    assert time.monotonic() - start > 0.5


def test_ranks_that_stay_are_an_error_after_the_deadline(tmp_path, rank):
    rank(30)
    with pytest.raises(UserError, match=f"{tmp_path}.*still alive after 0.2 s"):
        wait_for_ranks(tmp_path, deadline_s=0.2)
