"""The process that keeps rollout servers: they outlive a rank, and nothing outlives the supervisor."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf.launch.local.server_keeper import ServerKeeper
from rlhf.ranks.parent import KEEPER, state_of
from rlhf.rollout.servers.keeper import Keeper, RemoteKeeper, keeper_of_this_run
from rlhf.storage.scratch import Scratch

SERVER = """
import os, sys, time
from rlhf.ranks.parent import die_with_parent
die_with_parent()
print(os.getpid(), os.environ["TMPDIR"], *sys.argv[1:], flush=True)
time.sleep(600)
"""
DEADLINE_S = 60.0


@pytest.fixture
def supervised(monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerKeeper]:
    keeper = ServerKeeper()
    for name, path in keeper.start().items():
        monkeypatch.setenv(name, path)
    yield keeper
    keeper.close()


def started(keeper: Keeper | RemoteKeeper, log: Path, name: str = "a") -> tuple[int, Path, str]:
    """Start a server; return its process id, scratch folder and URL."""
    url = keeper.start(name, ["-c", SERVER], dict(os.environ), str(log), "print")
    end = time.monotonic() + DEADLINE_S
    while not log.exists() or not log.read_text().endswith("\n"):
        assert time.monotonic() < end
        time.sleep(0.02)
    pid, scratch, flag, port = log.read_text().splitlines()[-1].split()
    assert (flag, url) == ("--port", f"http://127.0.0.1:{port}")
    return int(pid), Path(scratch), url


def until_gone(pid: int) -> None:
    end = time.monotonic() + DEADLINE_S
    while state_of(pid) not in "ZX":
        assert time.monotonic() < end
        time.sleep(0.02)


def test_the_next_attempt_finds_the_server_of_a_killed_rank(supervised: ServerKeeper, tmp_path: Path):
    code = "import sys; from tests.unit.test_server_keeper import *; started(keeper_of_this_run(), Path(sys.argv[1]))"
    rank = subprocess.Popen([sys.executable, "-c", f"{code}; time.sleep(600)", str(tmp_path / "log")])
    end = time.monotonic() + DEADLINE_S
    while (url := keeper_of_this_run().find("a", "print")) is None:
        assert time.monotonic() < end
        time.sleep(0.05)
    rank.kill()
    rank.wait()
    next_attempt = keeper_of_this_run()
    assert isinstance(next_attempt, RemoteKeeper)
    assert next_attempt.find("a", "print") == url
    assert next_attempt.poll("a") is None
    assert next_attempt.find("a", "another") is None
    assert next_attempt.find("b", "print") is None
    next_attempt.close()
    assert next_attempt.find("a", "print") == url
    next_attempt.kill("a")
    assert next_attempt.poll("a") == -signal.SIGKILL
    assert next_attempt.find("a", "print") is None


def test_a_restart_ends_the_earlier_server_first(supervised: ServerKeeper, tmp_path: Path):
    first, scratch, _ = started(keeper_of_this_run(), tmp_path / "first")
    second, _, _ = started(keeper_of_this_run(), tmp_path / "second")
    assert state_of(first) in "ZX"
    assert not scratch.exists()
    assert state_of(second) not in "ZX"


def test_the_servers_end_with_the_supervisor(supervised: ServerKeeper, tmp_path: Path):
    pid, scratch, _ = started(keeper_of_this_run(), tmp_path / "log")
    folder = Path(os.environ[KEEPER]).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    supervised.close()
    assert state_of(pid) in "ZX"
    assert not scratch.exists()
    assert not folder.exists()


def test_the_servers_end_with_a_killed_keeper_and_another_one_follows(supervised: ServerKeeper, tmp_path: Path):
    pid, _, _ = started(keeper_of_this_run(), tmp_path / "log")
    process = supervised._process
    assert process is not None
    process.kill()
    process.wait()  # the servers may be gone before the keeper is
    until_gone(pid)
    with pytest.raises(OSError, match="keeps the rollout servers"):
        keeper_of_this_run().poll("a")
    assert supervised.start()[KEEPER] != os.environ[KEEPER]
    assert supervised._process is not process


@pytest.mark.parametrize("sent", [b"", b'["poll", "a', b'["poll", "a"]\n'])
def test_a_rank_that_is_killed_in_a_call_ends_no_keeper(supervised: ServerKeeper, sent: bytes):
    with socket.socket(socket.AF_UNIX) as rank:
        rank.connect(os.environ[KEEPER])
        rank.sendall(sent)
        # The connection closes at once, so the keeper cannot deliver its answer.
        rank.shutdown(socket.SHUT_RDWR)
    assert keeper_of_this_run().poll("a") is None
    assert supervised._process is not None
    assert supervised._process.poll() is None


def test_the_servers_end_with_a_killed_supervisor(tmp_path: Path):
    """The supervisor has no chance to end anything; the kernel kills the keeper, and with it the server."""
    code = (
        "import os, sys, time; from tests.unit.test_server_keeper import *; "
        "os.environ.update(ServerKeeper().start()); print(started(keeper_of_this_run(), Path(sys.argv[1]))[0], "
        "flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        pid = int(supervisor.stdout.readline())
        assert state_of(pid) not in "ZX"
        supervisor.kill()
    until_gone(pid)


def test_a_stopped_keeper_is_replaced(supervised: ServerKeeper, tmp_path: Path):
    pid, _, _ = started(keeper_of_this_run(), tmp_path / "log")
    process = supervised._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    end = time.monotonic() + DEADLINE_S
    while state_of(process.pid) != "T":
        assert time.monotonic() < end
    supervised.start()
    assert supervised._process is not process
    until_gone(pid)


def test_a_keeper_that_runs_is_not_started_again(supervised: ServerKeeper):
    process = supervised._process
    assert supervised.start() == {KEEPER: os.environ[KEEPER]}
    assert supervised._process is process


def test_a_server_that_cannot_be_started_is_an_error_and_the_keeper_lives_on(supervised: ServerKeeper, tmp_path: Path):
    with pytest.raises(OSError, match="No such file"):
        started(keeper_of_this_run(), tmp_path / "missing" / "log")
    assert keeper_of_this_run().poll("a") is None


def test_a_server_that_cannot_be_started_leaves_no_scratch_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    made: list[Scratch] = []

    def recorded() -> Scratch:
        made.append(Scratch())
        return made[-1]

    monkeypatch.setattr("rlhf.rollout.servers.keeper.Scratch", recorded)
    with pytest.raises(OSError, match="No such file"):
        started(Keeper(), tmp_path / "missing" / "log")
    assert [scratch.folder.exists() for scratch in made] == [False]


def test_without_a_supervisor_a_rank_keeps_its_servers_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv(KEEPER, raising=False)
    keeper = keeper_of_this_run()
    pid, scratch, url = started(keeper, tmp_path / "log")
    assert keeper.find("a", "print") == url
    keeper.close()
    assert state_of(pid) in "ZX"
    assert not scratch.exists()
