"""Watches the files of a run and sends its alerts: python -m rlhf.tracking.alerts.alert_process RUN_DIR STARTS.

STARTS is the number of earlier starts in events.jsonl. The process only reads what the training writes. Its stdin is a
pipe from the process that finishes the run. When this pipe closes, the process sends the last alerts and ends. stderr
is a pipe for warnings.
"""

import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

from rlhf.config import AlertsConfig
from rlhf.config.resolved import load
from rlhf.errors import UserError
from rlhf.ranks.next_start import changes_to_continue
from rlhf.ranks.run_events import RunEvent, read_events
from rlhf.ranks.stop import STOP_SIGNALS
from rlhf.storage.layout import EVENTS, HISTORY, RESOLVED
from rlhf.tracking.alerts.alert import Alert, alert_of_verdict, alerts_of_events
from rlhf.tracking.alerts.alert_delivery import post, run_command
from rlhf.tracking.alerts.alert_ledger import AlertLedger
from rlhf.tracking.alerts.alert_sender import last_look_s
from rlhf.tracking.history import Record
from rlhf.tracking.history_follower import HistoryFollower
from rlhf.tracking.verdict import NOT_FINITE, is_broken, judge_run

EVERY_S = 1.0
JUDGE_STEPS, JUDGE_SHARE = 10, 0.05
"""A run is judged again after this many steps, or this share of its steps so far, whichever is more."""


class AlertWatcher:
    """Finds the alerts that are due, and sends each once."""

    def __init__(self, run_dir: Path, name: str, config: AlertsConfig, starts: int = 0, changes: str = "") -> None:
        self._run_dir, self._name, self._config, self._changes = run_dir, name, config, changes
        self._ledger, self._follower = AlertLedger(run_dir), HistoryFollower(run_dir / HISTORY)
        self._judge_at, self._last_step = config.first_step, 0
        self._events_seen: tuple[int, int] | None = None
        self._starts = starts

    def look(self, *, ended: bool = False) -> None:
        """Send new alerts. `ended`: the command has ended."""
        new = self._follower.new()
        self._last_step = new[-1]["step"] if new else self._last_step
        events: list[RunEvent] = []
        if (seen := self._size_of_events()) != self._events_seen or ended:
            self._events_seen = seen
            events = self._own_events()
        # A finished run is judged however short it is, as in its report.
        self._judge(new, finished=bool(events) and events[-1].kind == "finished")
        for alert in alerts_of_events(events, self._newest_step(), ended=ended, changes=self._changes):
            self._send(alert)

    def _own_events(self) -> list[RunEvent]:
        """Return the events up to the start of the next command. That command has its own process for alerts."""
        events = read_events(self._run_dir)
        starts = [i for i, event in enumerate(events) if event.kind == "started"]
        return events[: starts[self._starts + 1]] if len(starts) > self._starts + 1 else events

    def _judge(self, new: list[Record], *, finished: bool) -> None:
        step = self._newest_step()
        broken = any(map(is_broken, new))
        if not (broken or finished or (new and step >= self._judge_at)):
            return
        self._judge_at = max(self._config.first_step, step + max(JUDGE_STEPS, int(step * JUDGE_SHARE)))
        with suppress(UserError, OSError):  # the history may be cut while it is read; a later look reads it again
            found = judge_run(self._run_dir)
            early = step < self._config.first_step and not finished
            if (not early or found.cause == NOT_FINITE) and (alert := alert_of_verdict(found, step)) is not None:
                self._send(alert)

    def _newest_step(self) -> int:
        if not self._last_step:
            tail = HistoryFollower(self._run_dir / HISTORY, from_tail=True).new()
            self._last_step = tail[-1]["step"] if tail else 0
        return self._last_step

    def _size_of_events(self) -> tuple[int, int]:
        try:
            stat = (self._run_dir / EVENTS).stat()
        except FileNotFoundError:
            return 0, 0
        return stat.st_ino, stat.st_size

    def _send(self, alert: Alert) -> None:
        if alert.kind not in self._config.kinds or not self._ledger.claim(alert):
            return
        facts: dict[str, object] = {
            "alert": alert.kind,
            "run": self._name,
            "run_dir": str(self._run_dir.absolute()),
            "step": alert.step,
            "cause": alert.text,
            "host": socket.gethostname(),
            "time": round(time.time(), 3),
            "text": f"{self._name}: {alert.kind} at step {alert.step}. {alert.text}",
        }
        for target, deliver in (("command", run_command), ("webhook", post)):
            if getattr(self._config, target):
                problem = deliver(self._config, facts)
                self._ledger.note(alert, target, problem)
                if problem is not None:
                    _warn(f"The alert {alert.kind!r} is not delivered: {problem}.")


def _warn(text: str) -> None:
    with suppress(OSError):  # the reader of the pipe may be dead
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def main(run_dir: Path, starts: int) -> None:
    """Watch the run until the process that finishes it has ended."""
    for number in (*STOP_SIGNALS, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)  # SLURM signals all processes of a job; the last alerts come after that
    config, parent = load(run_dir / RESOLVED), os.getppid()
    alerts = config.tracking.alerts
    name = f"{config.trainer.project_name}/{config.trainer.experiment_name}"
    changes = changes_to_continue(config.trainer)
    watcher = AlertWatcher(run_dir, name, alerts, starts, changes)
    while os.getppid() == parent and not select.select([sys.stdin], [], [], EVERY_S)[0]:
        try:
            watcher.look()
        except OSError as error:  # a later look may read the files again
            _warn(f"Alerts of {run_dir} are late: {error}.")
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(int(last_look_s(alerts)))
    watcher.look(ended=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
