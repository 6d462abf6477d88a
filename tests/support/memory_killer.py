"""Kills processes of a run once at each planned event of its snapshots in memory, by RLHF_EVENT_LISTENER.

Rank 0 notes in a file each step that begins, and each rank its kills, so that a test can count repeated steps.
"""

import json
import os
import signal
import threading
import time
from pathlib import Path

from rlhf.events import LISTENER_VARIABLE
from rlhf.ranks.parent import SUPERVISOR_PID

VARIABLE = "RLHF_TEST_MEMORY_KILLS"
LONGEST_WAIT_S = 2.0
_waits = threading.Event()


def killing(folder: Path, kills: list[tuple[str, int, str, bool]]) -> dict[str, str]:
    """Return the environment of a run with `kills`: event, rank, victim (rank or supervisor), and whether the kill
    waits until the loop waits for the snapshot, at most LONGEST_WAIT_S seconds."""
    folder.mkdir()
    plan = {"folder": str(folder), "kills": kills}
    return {LISTENER_VARIABLE: f"{__name__}:on_event", VARIABLE: json.dumps(plan)}


def noted(folder: Path) -> list[str]:
    """Return the lines of the file: `PID begin` or `PID kill EVENT`."""
    return (folder / "notes").read_text().splitlines()


def on_event(event: str) -> None:
    plan = json.loads(os.environ[VARIABLE])
    folder, rank = Path(plan["folder"]), int(os.environ["RANK"])
    loop = threading.current_thread() is threading.main_thread()
    if loop and event in ("step.begin", "memory.wait"):
        if event == "step.begin" and rank == 0:
            _note(folder, f"{os.getpid()} begin")
        _waits.set() if event == "memory.wait" else _waits.clear()
    if not loop and threading.current_thread().name != "memory-writer":
        return
    if loop and not event.startswith("memory."):
        return
    for number, (name, observer, victim, last) in enumerate(plan["kills"]):
        if (name, observer) != (event, rank) or (folder / f"fired_{number}").exists():
            continue
        if all((folder / f"fired_{before}").exists() for before in range(number)):
            if last:
                _waits.wait(LONGEST_WAIT_S)
            (folder / f"fired_{number}").touch()
            _note(folder, f"{os.getpid()} kill {event}")
            os.kill(int(os.environ[SUPERVISOR_PID]) if victim == "supervisor" else os.getpid(), signal.SIGKILL)
            time.sleep(60)


def _note(folder: Path, line: str) -> None:
    with (folder / "notes").open("a") as file:
        file.write(line + "\n")
