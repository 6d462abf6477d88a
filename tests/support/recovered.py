"""Records weight updates of a killed run, to measure how soon the run continues."""

import os
import time
from collections.abc import Collection
from pathlib import Path

NOTES_VARIABLE = "RLHF_TEST_UPDATES"


def on_event(event: str) -> None:
    """As RLHF_EVENT_LISTENER, append a line `PID SECONDS` (monotonic clock) at each update on rank 0."""
    if event == "update.mid" and os.environ["RANK"] == "0":
        with Path(os.environ[NOTES_VARIABLE]).open("a") as notes:
            notes.write(f"{os.getpid()} {time.monotonic():.3f}\n")


class Updates:
    """Reads the ranks' notes in the file `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_text("")

    @property
    def environment(self) -> dict[str, str]:
        return {NOTES_VARIABLE: str(self.path)}

    def newest(self) -> float:
        """Return the time of the last update; -inf before the first."""
        lines = self.path.read_text().split("\n")[:-1]
        return float(lines[-1].split()[1]) if lines else float("-inf")

    def first(self, after: float, before: float, not_of: Collection[int]) -> float | None:
        """Return the time of the first update between `after` and `before` by a process not in `not_of`."""
        for line in self.path.read_text().split("\n")[:-1]:
            pid, at = line.split()
            if after < float(at) < before and int(pid) not in not_of:
                return float(at)
        return None
