"""Reads stacks that a rank has written: the frames of a thread, and whether it waits for other ranks."""

import re
from collections.abc import Sequence


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
