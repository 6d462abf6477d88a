"""Interrupts a run once at an exact event by RLHF_EVENT_LISTENER, planned in a JSON variable."""

import json
import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

from rlhf.events import LISTENER_VARIABLE
from rlhf.ranks.parent import PARENT_PID, SUPERVISOR_PID

VARIABLE = "RLHF_TEST_INTERRUPT"
_seen = 0


class Planned(Exception):
    """The crash that a test planned."""


def at(
    event: str,
    number: int,
    what: str,
    *,
    to: str = "rank",
    rank: int = 0,
    once: Path | None = None,
    after_s: float = 0.0,
) -> dict[str, str]:
    """Return the environment that interrupts `rank`, the supervisor, the launcher or the job at this start's `number`th
    `event`.

    `what` is a signal's name or "raise". A signal comes `after_s` seconds after the event, while the rank goes on. With
    `to="job"`, SLURM sends the signal to the batch script of this rank's job, as before the time limit. With `once`, a
    marker file, only the first start that reaches the event is interrupted.
    """
    plan: dict[str, Any] = {"event": event, "number": number, "what": what, "to": to, "rank": rank}
    plan |= {"once": str(once or ""), "after_s": after_s}
    return {LISTENER_VARIABLE: f"{__name__}:on_event", VARIABLE: json.dumps(plan)}


def on_event(event: str) -> None:
    """Interrupt at the planned event."""
    global _seen
    plan = json.loads(os.environ[VARIABLE])
    if event != plan["event"] or int(os.environ["RANK"]) != plan["rank"]:
        return
    _seen += 1
    if _seen != plan["number"]:
        return
    if plan["once"]:
        if Path(plan["once"]).exists():
            return
        Path(plan["once"]).touch()
    if plan["what"] == "raise":
        raise Planned(f"asked for at {event} number {_seen}")
    if plan["to"] == "job":
        signal_name = plan["what"].removeprefix("SIG")
        subprocess.run(["scancel", "--batch", f"--signal={signal_name}", os.environ["SLURM_JOB_ID"]], check=True)
        return
    named = {"supervisor": SUPERVISOR_PID, "launcher": PARENT_PID}.get(plan["to"])
    victim, number = int(os.environ[named]) if named else os.getpid(), signal.Signals[plan["what"]]
    if plan["after_s"]:
        threading.Timer(plan["after_s"], os.kill, (victim, number)).start()
    else:
        os.kill(victim, number)
