"""Updates of the weights, noted by the ranks of a run that is killed, to tell how soon it goes on."""

import os
import time
from collections.abc import Collection
from pathlib import Path

NOTES_VARIABLE = "RLHF_TEST_UPDATES"


def on_event(event: str) -> None:
    """Listener (RLHF_EVENT_LISTENER): rank 0 adds a line `PID SECONDS`, on the monotonic clock, at each update."""
    if event == "update.mid" and os.environ["RANK"] == "0":
        with Path(os.environ[NOTES_VARIABLE]).open("a") as notes:
            notes.write(f"{os.getpid()} {time.monotonic():.3f}\n")


class Updates:
    """The notes of the ranks in the file `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_text("")

    @property
    def environment(self) -> dict[str, str]:
        return {NOTES_VARIABLE: str(self.path)}

    def newest(self) -> float:
        """The moment of the last one; -inf before the first."""
        lines = self.path.read_text().split("\n")[:-1]
        return float(lines[-1].split()[1]) if lines else float("-inf")

    def first(self, after: float, before: float, not_of: Collection[int]) -> float | None:
        """The moment of the first between the two by a process that is none of `not_of`."""
        for line in self.path.read_text().split("\n")[:-1]:
            pid, at = line.split()
            if after < float(at) < before and int(pid) not in not_of:
                return float(at)
        return None
