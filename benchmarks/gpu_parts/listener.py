"""Records a run's events with its GPU memory, and kills the run once at a chosen event (`RLHF_EVENT_LISTENER`)."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

FOLDER, KILL = "RLHF_BENCHMARK_FOLDER", "RLHF_BENCHMARK_KILL"
_seen = 0


def listening(folder: Path, kill: str = "") -> dict[str, str]:
    """Return the environment of a run that records its events in `folder` and dies at the second event named `kill`."""
    listener = f"{__name__}:on_event"
    return {"RLHF_EVENT_LISTENER": listener, FOLDER: str(folder), KILL: kill}


def events(folder: Path) -> list[dict[str, Any]]:
    """Return the recorded events of the runs in `folder` so far, oldest first."""
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def on_event(event: str) -> None:
    """Record time and memory. Kill this rank at the second event with the requested name, once per folder."""
    global _seen
    import torch

    folder = Path(os.environ[FOLDER])
    note: dict[str, Any] = {"time": time.time(), "event": event}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info()
        note["beside torch"] = total - free - torch.cuda.memory_reserved()
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps(note) + "\n")
    if event != os.environ[KILL]:
        return
    _seen += 1
    marker = folder / f"killed-{event}"
    if _seen == 2 and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
