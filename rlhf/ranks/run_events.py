"""Appends to and reads events.jsonl: the starts, saves, crashes and ends of a run, with their causes.

The supervisor and the first rank append, each event with one write, without a sync. The file is never cut, so readers
in other processes, which take no lock, see all events of the run, also after kills.
"""

import json
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlhf.config.redaction import Redaction
from rlhf.storage.files import open_to_append
from rlhf.storage.layout import EVENTS

log = logging.getLogger(__name__)

Kind = Literal[
    "started",
    "resumed",
    "rolled back",
    "training",
    "saved",
    "save failed",
    "crashed",
    "stopped",
    "failed",
    "finished",
]
ENDS = ("stopped", "failed", "finished")
"""Events after which the command ends: on request, by an error that a restart cannot fix, or with the last step."""
KILLED = "killed"
"""Kind of the event that `with_kills` inserts: a killed command cannot record its own end."""
_LONGEST = 4000
"""Largest number of characters of a text in an event."""


@dataclass(frozen=True)
class RunEvent:
    """An event, its time in seconds since 1970, and its facts.

    Most events have `step`. A start has `host` and `release`, and `alerts` if alerts are on. The event `training` has
    `total_steps`. A save, resume or rollback has `seconds` and `bytes`. A failure has `cause` (one line), and after a
    crash also `details` (evidence) and `hang`. A crash with a restart has `restart` and `max_restarts`.
    """

    time: float
    kind: str
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def step(self) -> int | None:
        """Return the step, if the event has one."""
        step = self.facts.get("step")
        return step if isinstance(step, int) else None

    @property
    def cause(self) -> str:
        """Return the cause in one line, or an empty text."""
        return str(self.facts.get("cause") or "")


def record_event(run_dir: Path, kind: Kind, **facts: Any) -> None:
    """Append an event, without secrets. If the write fails, log a warning; the run goes on."""
    redact = Redaction(os.environ)
    texts = {key: redact(value)[:_LONGEST] for key, value in facts.items() if isinstance(value, str)}
    line = json.dumps({"time": round(time.time(), 3), "event": kind, **facts, **texts}) + "\n"
    try:
        fd = open_to_append(run_dir / EVENTS)
        try:
            if _is_torn(run_dir / EVENTS):  # or this line would be lost, too
                line = f"\n{line}"
            os.write(fd, line.encode())
        finally:
            os.close(fd)
    except OSError as error:
        log.warning("The event %r is not recorded in %s: %s", kind, EVENTS, error)


def _is_torn(path: Path) -> bool:
    """Return whether the last line has no end, because the disk was full."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        return file.read() not in (b"", b"\n")


def read_events(run_dir: Path) -> list[RunEvent]:
    """Return the events in their order. Skip lines that are not events, such as the torn line of a full disk."""
    try:
        lines = (run_dir / EVENTS).read_bytes().splitlines()
    except FileNotFoundError:
        return []
    events = []
    for line in lines:
        try:
            facts = json.loads(line)
            events.append(RunEvent(float(facts.pop("time")), str(facts.pop("event")), facts))
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            continue
    return events


def with_kills(events: Sequence[RunEvent], *, killed_now: bool = False) -> list[RunEvent]:
    """Insert a KILLED event before each start that does not follow an end: a kill or a power cut ended the run there.

    `killed_now`: the command has ended, so an end may be missing after the last event as well.
    """
    found: list[RunEvent] = []
    for event in [*events, *([RunEvent(0.0, "started")] if killed_now else [])]:
        if event.kind == "started" and found and found[-1].kind not in ENDS:
            cause = "the command was killed, or the machine or disk failed; the time shown is the last event's time"
            found.append(RunEvent(found[-1].time, KILLED, {"cause": cause}))
        found.append(event)
    return found[:-1] if killed_now else found
