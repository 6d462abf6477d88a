"""Runs asyncio tasks in virtual time: the clock jumps to the next timer."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _JumpSelector(selectors.SelectSelector):
    """Jumps to the next timer instead of waiting for it."""

    jumped = 0.0

    def select(self, timeout: float | None = None) -> list:
        events = super().select(0 if timeout is None or timeout > 0 else timeout)
        if not events and timeout:
            self.jumped += timeout
        return events


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock stands still while code runs, and jumps when all tasks wait."""

    def __init__(self) -> None:
        self._jumps = _JumpSelector()
        super().__init__(self._jumps)

    def time(self) -> float:
        return self._jumps.jumped


def run_in_virtual_time(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)
