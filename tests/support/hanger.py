"""Hangs ranks at exact moments: subscribed in every rank through RLHF_EVENT_LISTENER, told what to do by a JSON
variable.

The plan is a list of hangs; each happens once, proven by its marker file, in the first start that comes there.
"""

import ctypes
import json
import os
import signal
import time
from pathlib import Path

from rlhf.events import LISTENER_VARIABLE

VARIABLE = "RLHF_TEST_HANGS"
_seen: dict[str, int] = {}


def hangs(folder: Path, *plan: tuple[str, int, int, str]) -> dict[str, str]:
    """The environment for hangs (event, its number in this start, rank, one of WAYS), with their markers in
    `folder`."""
    entries = [
        {"event": event, "number": number, "rank": rank, "way": way, "marker": str(folder / f"hung_{i}")}
        for i, (event, number, rank, way) in enumerate(plan)
    ]
    return {LISTENER_VARIABLE: f"{__name__}:on_event", VARIABLE: json.dumps(entries)}


def sleep_forever() -> None:
    while True:
        time.sleep(3600)


def turn_forever() -> None:
    while True:
        pass


def hold_the_gil() -> None:
    """As an extension does that waits without letting go: no other thread of the process runs."""
    while True:
        ctypes.PyDLL(None).pause()


def stop_forever() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def wait_for_nobody() -> None:
    """A deadlocked collective: the peers never send, and it has no deadline within a test's."""
    import torch
    import torch.distributed as dist

    dist.recv(torch.zeros(1), src=1 - dist.get_rank(), tag=77)


def wait_for(mark: Path) -> None:
    """Until a file is there."""
    while not mark.exists():
        time.sleep(0.01)


def pause() -> None:
    time.sleep(9)


def rest() -> None:
    time.sleep(0.2)


WAYS = {way.__name__: way for way in (sleep_forever, hold_the_gil, stop_forever, pause)}


def on_event(event: str) -> None:
    """The listener."""
    _seen[event] = _seen.get(event, 0) + 1
    for hang in json.loads(os.environ[VARIABLE]):
        here = event == hang["event"] and _seen[event] >= hang["number"] and int(os.environ["RANK"]) == hang["rank"]
        if here and not Path(hang["marker"]).exists():
            Path(hang["marker"]).touch()
            WAYS[hang["way"]]()
