"""Kills processes of a run at exact events by RLHF_EVENT_LISTENER, driven by a plan file.

The plan is a JSON list of kills. Each rank finds the first kill that has not fired. The kill's `observer` rank waits
for its `event` after the publication of a checkpoint of at least `after_step`, and sends SIGKILL to the `victim`. A
marker file, written before the signal, shows that the kill fired and prevents another kill after the restart.

At an event of a background save, its thread blocks until the loop has passed `ahead` more events or waits for the save.
The marker then contains the number of events that the loop passed.
"""

import json
import os
import signal
import threading
import time
from pathlib import Path

from rlhf.ranks.parent import SUPERVISOR_PID
from rlhf.storage.layout import scan, step_of

PLAN_VARIABLE = "RLHF_TEST_KILL_PLAN"
LONGEST_WAIT_S = 3.0


class Killer:
    def __init__(self, plan: Path) -> None:
        self.folder = plan.parent
        self.run_dir = Path(plan.with_name("run_dir").read_text())
        self.rank = int(os.environ["RANK"])
        (self.folder / f"pid_{self.rank}").write_text(str(os.getpid()))
        pending = [kill for kill in json.loads(plan.read_text()) if not self.marker(kill).exists()]
        self.kill = pending[0] if pending else None
        self.loop_events = 0
        self.loop_waits = False

    def marker(self, kill: dict) -> Path:
        return self.folder / f"fired_{kill['id']:04d}"

    def on_event(self, event: str) -> None:
        kill, behind = self.kill, threading.current_thread() is not threading.main_thread()
        if not behind:
            self.loop_events += 1
            self.loop_waits = event in ("commit.wait", "memory.wait")
        if kill is None or event != kill["event"] or self.rank != kill["observer"]:
            return
        newest = next((step_of(path) for path in scan(self.run_dir)), 0)
        if newest < kill["after_step"]:
            return
        came_further = self.wait_for_events(kill["ahead"]) if behind else ""
        with self.marker(kill).open("x") as marker:
            marker.write(str(came_further))
        os.kill(self.pid_of(kill["victim"]), signal.SIGKILL)
        # The victim is another process: stay at this point until its death ends this rank, too.
        time.sleep(60)
        raise AssertionError(f"rank {self.rank} outlived kill {kill}")

    def wait_for_events(self, ahead: int) -> int:
        """Wait for the loop's next `ahead` events, and return their number."""
        before, end = self.loop_events, time.monotonic() + LONGEST_WAIT_S
        while self.loop_events < before + ahead and not self.loop_waits and time.monotonic() < end:
            time.sleep(0.001)
        return self.loop_events - before

    def pid_of(self, victim: str) -> int:
        if victim == "supervisor":
            return int(os.environ[SUPERVISOR_PID])
        return int((self.folder / f"pid_{victim}").read_text())


_killer: Killer | None = None


def on_event(event: str) -> None:
    """Fire planned kills. The plan is read at the first event."""
    global _killer
    if _killer is None:
        _killer = Killer(Path(os.environ[PLAN_VARIABLE]))
    _killer.on_event(event)
