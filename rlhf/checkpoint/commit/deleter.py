"""Deletes trash in a background thread during the training; the next start deletes the rest."""

import threading
from pathlib import Path

from rlhf.checkpoint.commit.removal import delete


class Deleter:
    """Deletes directories renamed to trash, one after another, in a thread that ends after the last directory."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._trash: list[Path] = []

    def submit(self, trash: Path) -> None:
        """Delete `trash` soon. The caller must not use `trash` any more."""
        with self._changed:
            self._trash.append(trash)
            if len(self._trash) == 1:
                # A daemon thread: a process, above all a crashed one, can end before the deletion is done.
                threading.Thread(target=self._run, name="checkpoint-deleter", daemon=True).start()

    def wait(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` seconds for the thread. Return whether the thread is done with all trash: it has
        deleted each directory, or has logged why it could not."""
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
