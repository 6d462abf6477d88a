"""Finds processes by their command lines."""

import contextlib
import time
from pathlib import Path


def running(text: str) -> list[str]:
    """Return the processes with `text` in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if text.encode() in path.read_bytes():
                found.append(path.parent.name)
    return found


def wait_until_gone(text: str) -> None:
    deadline = time.monotonic() + 120
    while running(text) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not running(text)
