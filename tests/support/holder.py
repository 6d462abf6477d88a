"""Holds rank 0 at exact events by RLHF_EVENT_LISTENER, planned in a JSON variable, until SIGTERM asks it to stop."""

import json
import os
import signal
import time
from pathlib import Path
from types import FrameType

from rlhf.events import LISTENER_VARIABLE

VARIABLE = "RLHF_TEST_HOLDS"
_seen: dict[str, int] = {}


def holds(folder: Path, *plan: tuple[str, int, int]) -> dict[str, str]:
    """Return the environment that holds rank 0 at (event, its number in this start, ranks of this start).

    The hold `i` happens once, and creates the file `held_I` in `folder`.
    """
    entries = [
        {"event": event, "number": number, "ranks": ranks, "marker": str(folder / f"held_{i}")}
        for i, (event, number, ranks) in enumerate(plan)
    ]
    return {LISTENER_VARIABLE: f"{__name__}:on_event", VARIABLE: json.dumps(entries)}


def on_event(event: str) -> None:
    """Hold at planned events."""
    _seen[event] = _seen.get(event, 0) + 1
    for hold in json.loads(os.environ[VARIABLE]):
        planned = (hold["event"], hold["number"], str(hold["ranks"]), "0")
        here = planned == (event, _seen[event], os.environ["WORLD_SIZE"], os.environ["RANK"])
        if here and not Path(hold["marker"]).exists():
            _wait_for_sigterm(Path(hold["marker"]))


def _wait_for_sigterm(marker: Path) -> None:
    handler, asked = signal.getsignal(signal.SIGTERM), []
    assert callable(handler)

    def handle(number: int, frame: FrameType | None) -> None:
        handler(number, frame)
        asked.append(number)

    signal.signal(signal.SIGTERM, handle)
    marker.touch()
    while not asked:
        time.sleep(0.1)
