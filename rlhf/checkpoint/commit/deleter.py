"""Deletion of trash in a thread behind the training.

What it does not get to, or a kill leaves half deleted, goes at the next start.
"""

import threading
from pathlib import Path

from rlhf.checkpoint.commit.removal import delete


class Deleter:
    """Deletes what was renamed to trash, one directory after another, in a thread that lives while there is any."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._trash: list[Path] = []

    def take(self, trash: Path) -> None:
        """Delete `trash` soon; nobody else may touch it from now on."""
        with self._changed:
            self._trash.append(trash)
            if len(self._trash) == 1:
                # A daemon: the end of the process, a crash above all, does not wait for it. Who wants to, calls `wait`.
                threading.Thread(target=self._run, name="checkpoint-deleter", daemon=True).start()

    def wait(self, timeout_s: float) -> bool:
        """Wait until all that was taken is gone (or was reported as not removable), at most `timeout_s` seconds;
        whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._trash, timeout_s)

    def _run(self) -> None:
        while True:
            delete(self._trash[0])
            with self._changed:
                del self._trash[0]
                self._changed.notify_all()
                if not self._trash:
                    return
