"""Runs one save: synchronously, or in a background thread during the training."""

import concurrent.futures
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from rlhf.checkpoint.save.writer import SaveResult
from rlhf.events import announce
from rlhf.ranks.transport import LostPeer


@dataclass
class SaveInFlight:
    """Runs the save of `step`.

    `reference_at`: the step at which the saved moving reference last changed, or None. `last`: whether no training
    follows the save. `name`: prefix of the save's events.
    """

    step: int
    reference_at: int | None
    timeout_s: float
    last: bool = False
    name: str = "commit"
    _outcome: Future[SaveResult] = field(default_factory=Future)
    _started: float = field(default_factory=time.monotonic)

    def run(self, write: Callable[[], SaveResult]) -> None:
        try:
            announce(f"{self.name}.before")
            try:
                result = write()
            finally:
                announce(f"{self.name}.after")
        except BaseException as error:
            self._outcome.set_exception(error)
        else:
            self._outcome.set_result(result)

    def start(self, write: Callable[[], SaveResult]) -> None:
        # A daemon, so that a crashed process can exit during the save. `Checkpointer.committing` waits for the save.
        threading.Thread(target=self.run, args=(write,), name=f"{self.name}-writer", daemon=True).start()

    @property
    def over(self) -> bool:
        """Whether the save has ended, in success or failure."""
        return self._outcome.done()

    @property
    def error(self) -> BaseException | None:
        """The error that ended the save; None while the save runs and after a success."""
        return self._outcome.exception() if self.over else None

    def wait_for_end(self, seconds: float) -> None:
        """Wait at most `seconds` until the save has succeeded or failed."""
        concurrent.futures.wait([self._outcome], seconds)

    def wait(self) -> SaveResult:
        """Wait for the result; raises the save's error, or LostPeer `timeout_s` seconds after the save's start."""
        if not self.over:
            announce(f"{self.name}.wait")
            concurrent.futures.wait([self._outcome], max(0.0, self._started + self.timeout_s - time.monotonic()))
        if not self.over:
            raise LostPeer(
                f"The checkpoint of step {self.step} was not written within checkpoint.timeout_s={self.timeout_s:g}; "
                "earlier checkpoints are intact."
            )
        return self._outcome.result()
