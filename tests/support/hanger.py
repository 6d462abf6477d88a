"""Hangs ranks at exact events by RLHF_EVENT_LISTENER, planned in a JSON variable.

The plan is a list of hangs. Each happens once, in the first start that reaches it, and leaves a marker file.
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
    """Return the environment for hangs (event, its number in this start, rank, key of WAYS); markers go to `folder`."""
    entries = [
        {"event": event, "number": number, "rank": rank, "way": way, "marker": str(folder / f"hung_{i}")}
        for i, (event, number, rank, way) in enumerate(plan)
    ]
    return {LISTENER_VARIABLE: f"{__name__}:on_event", VARIABLE: json.dumps(entries)}


def sleep_forever() -> None:
    while True:
        time.sleep(3600)


def busy_loop_forever() -> None:
    while True:
        pass


def hold_the_gil() -> None:
    """Block all threads of the process, like an extension that waits without releasing the GIL."""
    while True:
        ctypes.PyDLL(None).pause()


def stop_forever() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def block_in_collective() -> None:
    """Deadlock in a collective: the peers never send, and its deadline is later than the test's."""
    import torch
    import torch.distributed as dist

    dist.recv(torch.zeros(1), src=1 - dist.get_rank(), tag=77)


def wait_for(mark: Path) -> None:
    """Wait until a file exists."""
    while not mark.exists():
        time.sleep(0.01)


def pause() -> None:
    time.sleep(9)


def rest() -> None:
    time.sleep(0.2)


WAYS = {way.__name__: way for way in (sleep_forever, hold_the_gil, stop_forever, pause)}


def on_event(event: str) -> None:
    """Hang at planned events."""
    _seen[event] = _seen.get(event, 0) + 1
    for hang in json.loads(os.environ[VARIABLE]):
        here = event == hang["event"] and _seen[event] >= hang["number"] and int(os.environ["RANK"]) == hang["rank"]
        if here and not Path(hang["marker"]).exists():
            Path(hang["marker"]).touch()
            WAYS[hang["way"]]()
