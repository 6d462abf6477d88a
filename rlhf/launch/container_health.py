"""python -m rlhf.launch.container_health: the images' health check, which fails if a run in the container is hung.

The command needs no arguments: it finds each run by a process that has opened the run's lock.
"""

import sys
from contextlib import suppress
from pathlib import Path

from rlhf.errors import UserError
from rlhf.printable import printable_output
from rlhf.ranks.lock import RUN_LOCK
from rlhf.storage.layout import RESOLVED
from rlhf.tracking.live_state import read_state

HEALTHY, UNHEALTHY = 0, 1
"""Exit codes for Docker, which reserves 2."""
_GONE = (FileNotFoundError, ProcessLookupError, PermissionError)
"""Errors of a process or file that has just ended or closed, or of a process of another user."""


def main(processes: Path = Path("/proc")) -> int:
    """Print the state of each run. Return UNHEALTHY if a run is hung, or if its files are damaged."""
    code = HEALTHY
    for run_dir in open_runs(processes):
        if not (run_dir / RESOLVED).is_file():  # the run starts, and has not written its settings yet
            continue
        try:
            found = read_state(run_dir)
            text = f"{run_dir} [{found.state}] {found.reason}"
        except UserError as error:
            code, text = UNHEALTHY, str(error)
        else:
            code = UNHEALTHY if found.state == "hung" else code
        sys.stdout.write(printable_output(f"{text.strip()}\n"))
    return code


def open_runs(processes: Path) -> list[Path]:
    """Return the directories of runs whose lock is open in a process of this user."""
    found = set()
    for process in processes.glob("[0-9]*"):
        with suppress(*_GONE):
            for link in (process / "fd").iterdir():
                with suppress(*_GONE):
                    if (target := link.readlink()).name == RUN_LOCK:
                        found.add(target.parent)
    return sorted(found)


if __name__ == "__main__":
    sys.exit(main())
