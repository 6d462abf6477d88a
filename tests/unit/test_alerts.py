"""Alerts: which are due, each once, and their delivery to real commands and a real HTTP server."""

import errno
import json
import math
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from rlhf.config import AlertsConfig
from rlhf.errors import UserError
from rlhf.ranks.run_events import RunEvent, read_events, record_event
from rlhf.storage.layout import EVENTS
from rlhf.tracking.alerts import alert_delivery, alert_ledger, check_alerts
from rlhf.tracking.alerts.alert import Alert, alerts_of_events
from rlhf.tracking.alerts.alert_delivery import post, run_command
from rlhf.tracking.alerts.alert_ledger import AlertLedger
from rlhf.tracking.alerts.alert_process import AlertWatcher
from rlhf.tracking.history import History
from tests.support.alert_server import alert_server

FACTS: dict[str, object] = {"alert": "stuck", "run": "rlhf/a", "step": 120, "cause": "nothing\0moved", "text": "t"}
ON = {"alerts": True}


def event(at: float, kind: str, **facts: object) -> RunEvent:
    return RunEvent(at, kind, facts)


def of(events: list[RunEvent], *, ended: bool = False) -> list[tuple[str, str]]:
    return [(alert.kind, alert.cause) for alert in alerts_of_events(events, 9, ended=ended)]


def test_crashes_kills_and_the_end_are_alerts_from_the_first_start_with_alerts_on():
    before = [event(1, "started"), event(2, "crashed", cause="old", step=1)]
    life = [
        event(3, "started", **ON),
        event(4, "crashed", cause="rank 1 died", step=3, restart=1, max_restarts=3),
        event(5, "saved", step=4),
        event(6, "started", **ON),
        event(7, "stopped", cause="SIGTERM"),
        event(8, "started", **ON),
        event(9, "finished"),
    ]
    assert of(before) == []
    found = of(before + life)
    assert [kind for kind, _ in found] == ["crashed", "crashed", "finished"]
    assert "rank 1 died" in found[0][1]
    assert found[1] == ("crashed", "killed after 5")
    # A kill that the process itself notices gives the same alert as one that the next start finds.
    assert of(before + life[:3], ended=True) == found[:2]
    assert of(before + life[:5], ended=True) == found[:2]
    (_, killed, _) = alerts_of_events(life, 9, changes=" without trainer.overwrite=true")
    assert killed.text.endswith(". The same command without trainer.overwrite=true continues the run.")


def test_only_one_of_several_processes_sends_the_same_alert(tmp_path: Path):
    alerts = [Alert("crashed", f"killed after {number}", "text", 5) for number in range(100)]
    with ThreadPoolExecutor(16) as pool:
        for alert in alerts:
            together = Barrier(16)

            def claim(_: int, alert: Alert = alert, together: Barrier = together) -> bool:
                together.wait(60)
                return AlertLedger(tmp_path).claim(alert)

            assert sum(pool.map(claim, range(16))) == 1
    with (tmp_path / "alerts.jsonl").open("a") as file:
        file.write('{"torn')
    assert not AlertLedger(tmp_path).claim(alert)


def listener(folder: Path) -> list[str]:
    """Return a command that appends an alert's facts to a file."""
    script = folder / "listener.py"
    script.write_text(
        "import json, os, sys\n"
        "facts = json.load(sys.stdin)\n"
        "named = {k: v for k, v in os.environ.items() if k.startswith('RLHF_ALERT')}\n"
        "open(sys.argv[1], 'a').write(json.dumps([facts, named, sys.argv[2:]]) + '\\n')\n"
    )
    return [sys.executable, str(script), str(folder / "heard.jsonl")]


def heard(folder: Path) -> list[str]:
    path = folder / "heard.jsonl"
    return [json.loads(line)[0]["alert"] for line in path.read_text().splitlines()] if path.exists() else []


def test_a_command_gets_the_facts_twice_and_no_shell(tmp_path: Path):
    assert run_command(AlertsConfig(command=[*listener(tmp_path), "$HOME; exit 3"]), FACTS) is None
    facts, named, arguments = json.loads((tmp_path / "heard.jsonl").read_text())
    assert facts == FACTS
    assert arguments == ["$HOME; exit 3"]
    assert named["RLHF_ALERT"] == "stuck"
    assert (named["RLHF_ALERT_STEP"], named["RLHF_ALERT_CAUSE"]) == ("120", "nothingmoved")


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("print('no such channel'); raise SystemExit(3)", "exit code 3: no such channel"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "exit code -9"),
        ("import subprocess, time; subprocess.Popen(['sleep', '60']); time.sleep(60)", "timeout_s=1 and was killed"),
    ],
)
def test_a_command_that_fails_or_hangs_is_a_problem_in_words(code: str, says: str):
    began = time.monotonic()
    problem = run_command(
        AlertsConfig(command=[sys.executable, "-c", code], timeout_s=1.0 if "sleep" in code else 20.0), FACTS
    )
    assert says in str(problem)
    assert time.monotonic() - began < 15
    assert "does not start" in str(run_command(AlertsConfig(command=["/nowhere/notify"]), FACTS))


def test_a_webhook_is_asked_again_only_if_it_has_not_taken_the_alert(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(alert_delivery, "RETRY_S", 0.1)
    with alert_server() as server:
        config = AlertsConfig(webhook=server.url, timeout_s=5.0)
        server.answers = [500, 429]
        assert post(config, FACTS) is None
        assert server.received == [FACTS]
        server.answers = [503, 503, 503, 503]
        assert str(post(config, FACTS)).endswith("answered 503")
        assert server.answers == [503]
        for refusal in (404, 302):
            server.answers = [refusal]
            assert str(post(config, FACTS)).endswith(f"answered {refusal}")
        server.hangs.set()
        began = time.monotonic()
        late = str(post(AlertsConfig(webhook=server.url, timeout_s=1.0), FACTS))
        assert "no answer in time" in late
        assert time.monotonic() - began < 10
        assert server.kinds == ["stuck"]
    gone = str(post(AlertsConfig(webhook=server.url, timeout_s=1.0), FACTS))
    assert "cannot be reached" in gone
    assert not [text for text in (late, gone) if "s3cr3t" in text]


def test_invalid_alert_settings_are_rejected_without_showing_the_webhook():
    with pytest.raises(UserError, match=r"tracking\.alerts\.command=.*notifi is not a program"):
        check_alerts(AlertsConfig(command=["notifi"]))
    with pytest.raises(UserError, match=r"tracking\.alerts\.webhook is not an address") as raised:
        check_alerts(AlertsConfig(webhook="hooks.example.org/s3cr3t"))
    assert "s3cr3t" not in str(raised.value)
    check_alerts(AlertsConfig(command=[sys.executable], webhook="https://hooks.example.org/x"))


def write_steps(run_dir: Path, rewards: list[float], first: int = 1, **more: float) -> None:
    history = History(run_dir / "metrics.jsonl")
    for step, reward in enumerate(rewards, first):
        history.append({"step": step, "reward/mean": reward, "reward/min": 0.0, "reward/max": 1.0, **more})


def watcher_of(run_dir: Path, starts: int = 0, **settings: object) -> AlertWatcher:
    return AlertWatcher(run_dir, "rlhf/a", AlertsConfig(command=listener(run_dir), **settings), starts)


def test_a_line_torn_by_a_full_disk_does_not_take_the_next_event_with_it(tmp_path: Path):
    record_event(tmp_path, "started")
    with (tmp_path / EVENTS).open("ab") as file:
        file.write(b'{"time": 1.0, "ev')
    record_event(tmp_path, "failed", cause="full")
    record_event(tmp_path, "started")
    assert [each.kind for each in read_events(tmp_path)] == ["started", "failed", "started"]
    assert len((tmp_path / EVENTS).read_bytes().splitlines()) == 4


def test_the_previous_watcher_does_not_report_the_next_command_as_killed(tmp_path: Path):
    watcher = watcher_of(tmp_path)
    record_event(tmp_path, "started", alerts=True)
    record_event(tmp_path, "saved", step=2)
    killed = read_events(tmp_path)[-1].time
    time.sleep(0.01)  # kills with the same time would be one alert
    record_event(tmp_path, "started", alerts=True)
    watcher.look(ended=True)
    assert heard(tmp_path) == ["crashed"]
    (claimed,) = (
        json.loads(line) for line in (tmp_path / "alerts.jsonl").read_text().splitlines() if '"alert"' in line
    )
    assert claimed["cause"] == f"killed after {killed}"


def test_a_full_disk_loses_no_alert_and_repeats_none(tmp_path: Path, monkeypatch):
    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    watcher = watcher_of(tmp_path)
    record_event(tmp_path, "started", alerts=True)
    monkeypatch.setattr(alert_ledger, "open_to_append", full)
    watcher.look(ended=True)
    watcher.look(ended=True)
    assert heard(tmp_path) == ["crashed"]


def test_a_run_that_does_not_learn_is_one_alert_from_the_first_step_on(tmp_path: Path):
    watcher = watcher_of(tmp_path, first_step=40)
    for first in (1, 21):
        write_steps(tmp_path, [0.5, 0.4] * 10, first)
        watcher.look()
        assert heard(tmp_path) == (["stuck"] if first == 21 else [])
    # Neither later steps, nor a restart, nor the end of the run repeat the alert; other alerts are sent.
    write_steps(tmp_path, [0.5, 0.4] * 30, 41)
    watcher.look()
    again = watcher_of(tmp_path, first_step=40)
    again.look()
    write_steps(tmp_path, [0.5, 0.4], 101)
    again.look()
    record_event(tmp_path, "started", alerts=True)
    record_event(tmp_path, "finished")
    again.look(ended=True)
    assert heard(tmp_path) == ["stuck", "finished"]
    (line, _) = (json.loads(line) for line in (tmp_path / "heard.jsonl").read_text().splitlines())
    assert line[0]["step"] == 40
    assert "did not rise" in line[0]["text"]


def test_a_nan_loss_sends_an_alert_at_once(tmp_path: Path):
    watcher = watcher_of(tmp_path)
    write_steps(tmp_path, [0.1, 0.2, 0.3])
    watcher.look()
    write_steps(tmp_path, [0.4], 4, **{"actor/loss": math.nan})
    watcher.look()
    write_steps(tmp_path, [0.4], 5, **{"actor/loss": math.nan})
    watcher.look()
    assert heard(tmp_path) == ["unstable"]


def test_a_nan_loss_does_not_alert_early_that_nothing_was_learned(tmp_path: Path):
    history, watcher = History(tmp_path / "metrics.jsonl"), watcher_of(tmp_path)
    for step in range(1, 12):
        same = dict.fromkeys(("reward/mean", "reward/min", "reward/max"), 0.0)
        history.append({"step": step, **same, "actor/loss": math.nan})
    watcher.look()  # the verdict is that nothing was learned
    assert heard(tmp_path) == []


def test_only_a_finished_run_is_judged_before_the_first_step(tmp_path: Path):
    record_event(tmp_path, "started", alerts=True)
    write_steps(tmp_path, [0.5, 0.4] * 10)
    record_event(tmp_path, "stopped", cause="SIGTERM")
    watcher_of(tmp_path).look(ended=True)
    assert heard(tmp_path) == []
    record_event(tmp_path, "started", alerts=True)
    record_event(tmp_path, "finished")
    watcher_of(tmp_path, starts=1).look(ended=True)
    assert heard(tmp_path) == ["stuck", "finished"]


def test_only_the_alerts_in_the_list_are_sent(tmp_path: Path):
    record_event(tmp_path, "started", alerts=True)
    record_event(tmp_path, "failed", cause="no memory", step=3)
    watcher_of(tmp_path, kinds=["finished"]).look(ended=True)
    assert heard(tmp_path) == []
    watcher_of(tmp_path, kinds=["crashed"]).look(ended=True)
    assert heard(tmp_path) == ["crashed"]
