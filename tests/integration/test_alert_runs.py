"""Alerts of whole runs: the command is killed and started again, and a webhook that hangs delays nothing."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhf.compose import compose_config
from rlhf.config.library import Library
from rlhf.config.resolved import to_yaml
from rlhf.errors import EXIT_DONE
from rlhf.ranks.run_events import record_event
from rlhf.tracking.alerts.alert_sender import MODULE
from tests.support.alert_server import AlertServer, alert_server
from tests.support.interrupter import at
from tests.support.launching import ROOT, records, small, train


@pytest.fixture
def server():
    with alert_server() as made:
        yield made


def command(folder: Path, sums: Path, server: AlertServer, *more: str) -> list[str]:
    return small(folder, "watched", sums, f"tracking.alerts.webhook={server.url}", *more)


def await_alerts(server: AlertServer, count: int) -> None:
    end = time.monotonic() + 60
    while len(server.received) < count:
        assert time.monotonic() < end, server.received
        time.sleep(0.1)


@pytest.mark.slow
def test_a_killed_command_a_crash_and_the_end_are_one_alert_each(tmp_path: Path, sums: Path, server: AlertServer):
    arguments, run_dir = command(tmp_path, sums, server), tmp_path / "rlhf" / "watched"
    killed = train(arguments, at("update.before", 3, "SIGKILL", to="supervisor"))
    assert killed.code == -signal.SIGKILL, killed.output
    await_alerts(server, 1)  # sent by the alert process, which outlives the command
    end = train(arguments, at("update.before", 2, "SIGKILL", once=tmp_path / "once"))
    assert end.code == EXIT_DONE, end.output
    assert server.kinds[:2] == ["crashed", "crashed"]
    assert "killed" in server.received[0]["text"]
    assert "Restart 1 of" in server.received[1]["text"]
    # 7 steps are too few for a verdict.
    assert server.kinds[2:] == ["finished"]
    assert server.received[2]["step"] == 7
    again = train(arguments)
    assert again.code == EXIT_DONE, again.output
    assert len(server.received) == 3
    for path in (run_dir / "resolved.yaml", run_dir / "run.log", run_dir / "events.jsonl", run_dir / "alerts.jsonl"):
        assert "s3cr3t" not in path.read_text(), path
    assert "s3cr3t" not in killed.output + end.output + again.output


@pytest.mark.slow
def test_a_webhook_that_hangs_and_a_command_that_fails_are_warnings(tmp_path: Path, sums: Path, server: AlertServer):
    server.hangs.set()
    fails = "tracking.alerts.command=[/bin/sh,-c,'echo no such channel; exit 3']"
    arguments = command(tmp_path, sums, server, fails, "tracking.alerts.timeout_s=3", "trainer.total_training_steps=2")
    end = train(arguments)
    assert end.code == EXIT_DONE, end.output
    assert "no answer in time" in end.output
    assert "exit code 3: no such channel" in end.output
    assert len(records(tmp_path / "rlhf" / "watched")) == 2
    results = [json.loads(line) for line in (tmp_path / "rlhf" / "watched" / "alerts.jsonl").read_text().splitlines()]
    assert [each["to"] for each in results if "sent" in each] == ["command", "webhook"]


@pytest.mark.parametrize(("ends", "heard"), [(False, ["crashed"]), (True, [])])
def test_a_closed_pipe_without_an_end_event_is_a_kill(tmp_path: Path, ends: bool, heard: list[str]):
    config = compose_config([], Library.find(None))
    config.tracking.alerts.command = ["sh", "-c", 'echo "$RLHF_ALERT" >> "$0"', str(tmp_path / "heard")]
    (tmp_path / "resolved.yaml").write_bytes(to_yaml(config).encode())
    record_event(tmp_path, "started", alerts=True)
    if ends:
        record_event(tmp_path, "stopped", cause="SIGTERM")
    watch = subprocess.Popen(
        [sys.executable, "-m", MODULE, str(tmp_path), "0"], cwd=ROOT, stdin=subprocess.PIPE, stderr=subprocess.PIPE
    )
    _, warnings = watch.communicate(timeout=120)
    assert (watch.returncode, warnings) == (0, b"")
    assert ((tmp_path / "heard").read_text().split() if heard else []) == heard
