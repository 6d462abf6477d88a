"""Runs long work on all ranks, with a keep-alive collective so that no timeout fires. Imports no torch."""

import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TypeVar

from rlhf.ranks.coordinator import Coordinator

T = TypeVar("T")
BEAT_S = 1.0
"""Seconds between two keep-alive calls."""
WORKING, FAILED = 1, 2


def with_keep_alive(
    action: Callable[[], T], failed: Callable[[T], bool], stop: Callable[[], None], coordinator: Coordinator
) -> T:
    """Run `action` on every rank, and return this rank's result when `action` has ended on all ranks. Collective.

    Args:
        action: runs in a thread, and may take longer than the timeout of a collective call. It must not raise.
        failed: returns whether a result is a failure.
        stop: makes this rank's `action` end early. It is called if `action` has failed on another rank.
    """
    ended: SimpleQueue[T] = SimpleQueue()
    threading.Thread(target=lambda: ended.put(action()), name="long work", daemon=True).start()
    results: list[T] = []
    while True:
        if not results:
            with suppress(Empty):
                results.append(ended.get(timeout=BEAT_S))
        own = (FAILED if failed(results[0]) else 0) if results else WORKING
        [states] = coordinator.bitwise_or(bytes([own]))
        if not states & WORKING:
            return results[0]
        if states & FAILED and not results:
            stop()
