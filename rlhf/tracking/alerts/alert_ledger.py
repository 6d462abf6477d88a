"""Records which alerts of a run were sent, so that none is sent twice."""

import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any

from rlhf.storage.files import open_to_append
from rlhf.storage.layout import ALERTS
from rlhf.tracking.alerts.alert import Alert


class AlertLedger:
    """Appends to `alerts.jsonl`, which several processes of a run may do at the same time."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / ALERTS

    def claim(self, alert: Alert) -> bool:
        """Record the alert before it is sent. Return False if it was recorded before.

        A process that is killed between record and delivery loses the alert, but no restart sends an alert twice.
        """
        fd = open_to_append(self._path)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if (alert.kind, alert.cause) in self._claimed():
                return False
            self._append(fd, {"alert": alert.kind, "cause": alert.cause, "step": alert.step, "text": alert.text})
            return True
        finally:
            os.close(fd)

    def note(self, alert: Alert, target: str, problem: str | None) -> None:
        """Record the delivery to the command or the webhook, or why it failed."""
        fd = open_to_append(self._path)
        try:
            self._append(fd, {"sent": alert.kind, "cause": alert.cause, "to": target, "problem": problem})
        finally:
            os.close(fd)

    @staticmethod
    def _append(fd: int, facts: dict[str, Any]) -> None:
        os.write(fd, json.dumps({"time": round(time.time(), 3), **facts}).encode() + b"\n")

    def _claimed(self) -> set[tuple[str, str]]:
        found = set()
        for line in self._path.read_bytes().splitlines():
            try:
                facts = json.loads(line)
                found.add((facts["alert"], facts["cause"]))
            except (ValueError, TypeError, LookupError):  # a delivery, or the torn line of a full disk
                continue
        return found
