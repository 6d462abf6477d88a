"""Measures a rank's peak memory in each phase of its steps, on Linux or on a GPU, with an event listener.

A rank with `RLHF_EVENT_LISTENER=tests.support.measured_memory:seen` writes lines of JSON to the file
`$MEASURED_MEMORY`: phase and bytes. Phase `base` is before any model is loaded. Bytes are resident bytes, or with
`MEASURED_DEVICE=cuda` torch's allocations on the GPU.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from rlhf.events import follow
from rlhf.ranks.phase_clock import PhaseClock
from tests.support.launching import DEADLINE_S

FILE = Path(os.environ.get("MEASURED_MEMORY", "/dev/null"))
ON_GPU = os.environ.get("MEASURED_DEVICE") == "cuda"


def measured(folder: Path, overrides: list[str], device: str = "cpu") -> dict[str, int]:
    """Run to the end; return peak bytes by phase (resident, or torch's on a GPU); `base` is before any model."""
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    listener = {
        # Map larger tensors separately, to measure tensors and not the gaps in glibc's heap.
        "MALLOC_MMAP_THRESHOLD_": str(256 << 10),
        "RLHF_EVENT_LISTENER": "tests.support.measured_memory:seen",
        "MEASURED_MEMORY": str(folder / "measured.jsonl"),
        "MEASURED_DEVICE": device,
        "MASTER_PORT": port,
    }
    done = subprocess.run(
        [sys.executable, "-m", "rlhf.train", *overrides],
        env=os.environ | ranks | listener,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    highest: dict[str, int] = {}
    for line in (folder / "measured.jsonl").read_text().splitlines():
        phase, size = json.loads(line)
        highest[phase] = max(size, highest.get(phase, 0))
    return highest


def highest() -> int:
    """Return the peak bytes of this process' resident set, or of its GPU tensors, since `begin_anew`."""
    if ON_GPU:
        return torch.cuda.max_memory_allocated()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def begin_anew() -> None:
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def note(phase: str) -> None:
    with FILE.open("a") as file:
        file.write(json.dumps([phase, highest()]) + "\n")
    begin_anew()


def seen(event: str) -> None:
    """Note memory at events around the phases that `PhaseClock` does not time."""
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
