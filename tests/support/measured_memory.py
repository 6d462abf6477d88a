"""Highest resident memory of a rank in each phase of its steps, as an event listener of a run on Linux.

A rank with `RLHF_EVENT_LISTENER=tests.support.measured_memory:seen` writes a line of JSON to the file that
`$MEASURED_MEMORY` names: the phase and the bytes, `base` before any model is loaded.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlhf.events import follow
from rlhf.ranks.phase_clock import PhaseClock

FILE = Path(os.environ.get("MEASURED_MEMORY", "/dev/null"))


def highest() -> int:
    """Bytes of this process's highest resident set since `begin_anew`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def begin_anew() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def note(phase: str) -> None:
    with FILE.open("a") as file:
        file.write(json.dumps([phase, highest()]) + "\n")
    begin_anew()


def seen(event: str) -> None:
    """Take note at the events around the phases that no clock is for."""
    if event == "step.begin":
        begin_anew()
    elif event == "update.before":
        note("generation")


def _loading(phase: str, done: int, total: int) -> None:
    if phase == "loading the weights":
        begin_anew()
        note("base")


@contextmanager
def _noted(self: PhaseClock, name: str) -> Iterator[None]:
    begin_anew()
    yield
    note(name)


if Path("/dev/null") != FILE:
    follow(_loading)
    PhaseClock.phase = _noted  # type: ignore[method-assign]
