"""Stacks of a process that may not react any more.

On SIGUSR2 it writes them itself, without Python's help (`rlhf.ranks.status`), and its supervisor reads them here.
"""

import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from rlhf.ranks.status import STACKS_SIGNAL

# A dump takes milliseconds; a process without one by then is stopped, stuck in the kernel or not that far yet.
PATIENCE_S = 3.0
_SETTLED_S = 0.2


def ask_for_stacks(files: Mapping[int, Path]) -> None:
    """Have the processes (id -> the file of `answer_with_stacks`) write their stacks; returns when they have, or after
    PATIENCE_S."""
    before = {path: _size(path) for path in files.values()}
    for process in files:
        with suppress(ProcessLookupError):
            os.kill(process, STACKS_SIGNAL)
    end, last, quiet_since = time.monotonic() + PATIENCE_S, before, time.monotonic()
    while (now := time.monotonic()) < end:
        sizes = {path: _size(path) for path in before}
        if sizes != last:
            last, quiet_since = sizes, now
        elif all(sizes[path] > before[path] for path in before) and now - quiet_since > _SETTLED_S:
            return
        time.sleep(0.02)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def frames_of(dump: str, thread: int) -> list[str]:
    """The frames of `thread` (its identity) in the newest dump, the innermost first; empty when it is not there."""
    blocks = re.findall(rf"hread 0x0*{thread:x}\b[^\n]*:\n((?:  [^\n]*\n?)*)", dump)
    return [line.strip() for line in blocks[-1].splitlines()] if blocks else []


def waits_for_peers(frames: Sequence[str]) -> bool:
    """Whether the thread is in a collective, where the fault is another rank's (as far as frames of Python tell)."""
    for frame in frames:
        if "/torch/distributed/" in frame or "/rlhf/ranks/" in frame:
            return True
        if "/torch/" not in frame:
            return False
    return False


def shown(frames: Sequence[str], count: int) -> list[str]:
    """`count` frames for a person: the innermost, then without PyTorch's own, of which a collective has dozens."""
    return [frame for i, frame in enumerate(frames) if i == 0 or "/torch/" not in frame][:count]


def why_silent(process: int) -> str:
    """The reason why the process has left no stacks, as the kernel (of Linux) sees it."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        state = ""
    if state in ("T", "t"):
        return "stopped, as by SIGSTOP or a debugger"
    if state == "D":
        return "blocked in the kernel: a disk, a network file system or a driver does not answer"
    return "no answer; so early in its start it is still importing"
