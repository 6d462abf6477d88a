"""The images' health check, with a process that has a run's lock."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf.launch.container_health import HEALTHY, UNHEALTHY, main
from rlhf.ranks.lock import RUN_LOCK
from rlhf.storage.layout import HISTORY, RESOLVED
from tests.support.published import eventually
from tests.support.refusals import says
from tests.support.run_folders import run_folder

HOLDER = """
import sys, time; from pathlib import Path; from rlhf.ranks.lock import run_lock
with run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def run(tmp_path) -> Path:
    return run_folder(tmp_path / "runs" / "a", 2)


@pytest.fixture
def holder(run) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen([sys.executable, "-c", HOLDER, run], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def processes(tmp_path, holder) -> Path:
    """A part of /proc: other tests on this machine have hung runs."""
    folder = tmp_path / "proc"
    folder.mkdir()
    (folder / str(holder.pid)).symlink_to(f"/proc/{holder.pid}")
    return folder


def test_a_run_is_healthy_until_it_hangs(run, holder, processes, capsys):
    assert main(processes) == HEALTHY
    says(capsys.readouterr().out, str(run), "[running]")
    os.kill(holder.pid, signal.SIGSTOP)
    eventually(lambda: main(processes) == UNHEALTHY)
    says(capsys.readouterr().out, str(run), "[hung]", "paused")
    os.kill(holder.pid, signal.SIGCONT)
    eventually(lambda: main(processes) == HEALTHY)


def test_without_a_process_there_is_nothing_to_check(run, holder, processes, capsys):
    holder.kill()
    holder.wait()
    assert (run / RUN_LOCK).exists()
    assert main(processes) == HEALTHY
    assert capsys.readouterr().out == ""


def test_a_run_that_starts_is_healthy_and_a_damaged_one_is_not(run, processes, capsys):
    (run / HISTORY).write_text("{\n")
    assert main(processes) == UNHEALTHY
    says(capsys.readouterr().out, HISTORY, "damaged")
    (run / RESOLVED).unlink()
    assert main(processes) == HEALTHY
