"""Records which alerts of a run were sent, so that none is sent twice."""

import fcntl
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlhf.storage.files import open_to_append
from rlhf.storage.layout import ALERTS
from rlhf.tracking.alerts.alert import Alert


class AlertLedger:
    """Appends to `alerts.jsonl`, which several processes of a run may do at the same time."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / ALERTS
        self._unwritten: set[tuple[str, str]] = set()  # alerts that could not be recorded, as on a full disk

    def claim(self, alert: Alert) -> bool:
        """Record the alert before it is sent. Return False if it was recorded before.

        A process that is killed between record and delivery loses the alert, but no restart sends an alert twice.
        """
        key = (alert.kind, alert.cause)
        try:
            fd = open_to_append(self._path)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                if key in self._claimed() | self._unwritten:
                    return False
                self._append(fd, {"alert": alert.kind, "cause": alert.cause, "step": alert.step, "text": alert.text})
            finally:
                os.close(fd)
        except OSError:  # the alert may be about the full disk
            new = key not in self._unwritten
            self._unwritten.add(key)
            return new
        return True

    def note(self, alert: Alert, target: str, problem: str | None) -> None:
        """Record the delivery to the command or the webhook, or why it failed."""
        with suppress(OSError):
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
            except (ValueError, TypeError, LookupError):  # the line records a delivery, or a full disk cut it off
                continue
        return found
