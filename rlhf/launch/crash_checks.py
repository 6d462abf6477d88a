"""Checks this node in a separate process, after two crashes in a row with the same cause.

`python -m rlhf.launch.crash_checks RUN_DIR` writes a line for each problem to its stdout.
"""

import logging
import os
import subprocess
import sys
import time
from pathlib import Path

from rlhf.launch.stop_request import StopRequest
from rlhf.ranks.parent import PARENT_PID, die_with_parent
from rlhf.storage.layout import RESOLVED

log = logging.getLogger(__name__)
DEADLINE_S = 20.0
"""Time limit of the checks, which delay the restart. The supervisor kills a late process and ignores its results."""
_LOOK_S = 0.05
_MOST_LINES = 20


def node_problems(run_dir: Path, stop: StopRequest) -> list[str]:
    """Return the problems that the quick checks of `rlhf.diagnosis` find on this node, a line each with the remedy.

    Return an empty list if the checks fail, take longer than DEADLINE_S seconds, or a stop is requested meanwhile.
    """
    if not (run_dir / RESOLVED).is_file():
        return []
    command = [sys.executable, "-m", "rlhf.launch.crash_checks", str(run_dir)]
    try:
        process = subprocess.Popen(
            command,
            env=os.environ | {PARENT_PID: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
    except OSError as error:  # no memory for a process; the restart may still succeed
        log.debug("The checks of this node did not start: %s", error)
        return []
    assert process.stdout is not None
    with process.stdout as output:
        end = time.monotonic() + DEADLINE_S
        while process.poll() is None and stop.signal_name is None and time.monotonic() < end:
            time.sleep(_LOOK_S)
        if process.poll() is None:
            process.kill()  # do not wait for its end: a broken disk or driver may keep it in the kernel
            return []
        return output.read().splitlines()[:_MOST_LINES]


def main(run_dir: Path) -> None:
    """Run the checks for the run in `run_dir`, and print the problems."""
    die_with_parent()
    from rlhf.config.resolved import from_yaml
    from rlhf.diagnosis.node_checks import check_node

    config = from_yaml((run_dir / RESOLVED).read_text())
    for found in check_node(config, "", DEADLINE_S / 3, quick=True):
        if found.level != "ok":
            os.write(1, f"{found.level}: {found.check}: {found.text}\n".encode())
    os._exit(0)  # the thread of a check that hangs would delay a normal end


if __name__ == "__main__":
    main(Path(sys.argv[1]))
