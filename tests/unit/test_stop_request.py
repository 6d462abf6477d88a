import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from rlhf.launch import stop_request
from rlhf.launch.callbacks import Callbacks
from rlhf.launch.stop_request import StopRequest

RANK = """
import os, signal, sys
from rlhf.ranks.stop import PreemptionFlag
flag = PreemptionFlag()
assert not flag.requested
os.kill(os.getpid(), int(sys.argv[1]))
print(flag.requested)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_rank_notes_the_request_and_lives_on(number):
    result = subprocess.run([sys.executable, "-c", RANK, str(int(number))], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout) == (0, "True\n"), result.stderr


def test_a_signal_that_nohup_ignores_stays_ignored():
    result = subprocess.run(
        ["sh", "-c", f"trap '' HUP; exec {sys.executable} -c '{RANK}' {int(signal.SIGHUP)}"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (result.returncode, result.stdout) == (0, "False\n"), result.stderr


def test_second_urgent_signal_asks_to_kill(monkeypatch):
    monkeypatch.setattr(stop_request, "_REPEAT_S", 1000.0)
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert (stop.signal_name, stop.kill) == ("SIGUSR1", False)
        monkeypatch.setattr(stop_request, "_REPEAT_S", 0.0)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.kill
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_callback_that_never_returns_ends_with_the_second_signal(tmp_path, monkeypatch):
    monkeypatch.setattr(stop_request, "_REPEAT_S", 0.2)
    history = tmp_path / "metrics.jsonl"

    def press(stop: StopRequest) -> None:
        while not stop.kill:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)

    def hang(step: int, metrics: object) -> None:
        pressing.start()
        time.sleep(600)

    callbacks = Callbacks([hang])
    callbacks.follow(history)
    history.write_text('{"step": 0}\n')
    with StopRequest() as stop:
        pressing = threading.Thread(target=press, args=[stop])
        start = time.monotonic()
        callbacks.look(stop)
        pressing.join()
        assert time.monotonic() - start < 60
        assert isinstance(callbacks.error, KeyboardInterrupt)
        assert (stop.signal_name, stop.kill) == ("SIGINT", True)


def test_waiting_ends_with_a_signal():
    with StopRequest() as stop:
        start = time.monotonic()
        stop.wait(0.2)
        assert 0.2 <= time.monotonic() - start < 120
        os.kill(os.getpid(), signal.SIGUSR1)
        stop.wait(600)
        assert time.monotonic() - start < 60
