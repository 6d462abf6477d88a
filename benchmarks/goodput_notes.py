"""An RLHF_EVENT_LISTENER for `benchmarks.goodput`: injects failures into a run, and notes rank 0's events."""

import errno
import json
import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FOLDER_VARIABLE, HISTORY_VARIABLE = "RLHF_GOODPUT_FOLDER", "RLHF_GOODPUT_HISTORY"
EVENTS = ("step.begin", "rollout.after", "update.before", "update.after", "metrics.before")
"""The noted events, in the order of a step."""
KINDS = ("rank", "driver", "supervisor", "storage")
KINDS_OF_NODES = ("rank", "driver", "storage", "node", "network")
_SAVING = "commit-writer"
"""Name of the thread that saves on disk."""


@dataclass(frozen=True)
class Failure:
    """A failure of a `kind`, `after` seconds after `step` begins. A storage failure hits the save of `step`."""

    kind: str
    step: int
    after: float


def plan_of(
    steps: int, count: int, save_every: int, step_s: float, chance: random.Random, kinds: Sequence[str] = KINDS
) -> list[Failure]:
    """Return at most `count` failures of all kinds in turn, at random times; at most one storage failure per save."""
    first, failures = chance.randrange(len(kinds)), list[Failure]()
    for number, step in enumerate(sorted(chance.sample(range(2, steps), count))):
        kind = kinds[(first + number) % len(kinds)]
        if kind == "storage":  # the last save comes after the last step
            step = min(-(-step // save_every) * save_every, (steps - 1) // save_every * save_every)
            if step == 0 or any(other.kind == kind and other.step == step for other in failures):
                continue
        failures.append(Failure(kind, step, chance.random() * step_s))
    return failures


_step: int | None = None


def on_event(event: str) -> None:
    """Note the event, and start or raise the failures that are planned here."""
    global _step
    folder, rank = Path(os.environ[FOLDER_VARIABLE]), int(os.environ["RANK"])
    in_front = threading.current_thread() is threading.main_thread()
    if in_front and event == EVENTS[0]:
        _step = _recorded(folder) + 1 if _step is None else _step + 1
    if in_front and event in EVENTS and rank == 0:
        note(folder, event=event, step=_step, pid=os.getpid())
    for number, failure in enumerate(_plan(folder)):
        if failure.kind == "storage":
            saves = event == "commit.fsync" and threading.current_thread().name == _SAVING and rank == 0
            if saves and _step is not None and _step >= failure.step and _fires(folder, number):
                note(folder, kind=failure.kind)
                raise OSError(errno.EIO, "the benchmark's input/output error")
        elif in_front and event == EVENTS[0] and failure.step == _step and rank == _victim(failure.kind):
            timer = threading.Timer(failure.after, _kill, (folder, number, failure.kind))
            timer.daemon = True
            timer.start()


def _victim(kind: str) -> int:
    """Return the rank that executes the failure."""
    return int(os.environ["WORLD_SIZE"]) - 1 if kind == "rank" else 0


def _kill(folder: Path, number: int, kind: str) -> None:
    from rlhf.ranks.parent import SUPERVISOR_PID

    if not _fires(folder, number):
        return
    if kind != "network":
        note(folder, kind=kind)
    if kind in ("node", "network"):  # `goodput_nodes.train` reads the file, and notes a cut when it is over
        (folder / "wanted.new").write_text(kind)
        (folder / "wanted.new").rename(folder / "wanted")
    else:
        os.kill(int(os.environ[SUPERVISOR_PID]) if kind == "supervisor" else os.getpid(), signal.SIGKILL)


@cache
def _plan(folder: Path) -> list[Failure]:
    return [Failure(**failure) for failure in json.loads((folder / "plan.json").read_text())]


def _recorded(folder: Path) -> int:
    """Return the last step in the metric history, 0 without a record."""
    history = Path(os.environ[HISTORY_VARIABLE])
    lines = history.read_text().splitlines() if history.exists() else []
    return int(json.loads(lines[-1])["step"]) if lines else 0


def _fires(folder: Path, number: int) -> bool:
    """Return whether the failure fires now, for the first time."""
    try:
        (folder / f"fired_{number}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def note(folder: Path, **entry: object) -> None:
    """Append a note of an event or of a failure."""
    with (folder / "notes.jsonl").open("a") as file:
        file.write(json.dumps({"time": time.time(), **entry}) + "\n")
