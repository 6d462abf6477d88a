"""Work of ranks that may take longer than a call between them: they meet while it goes on. Imports no torch."""

import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TypeVar

from rlhf.ranks.coordinator import Coordinator

T = TypeVar("T")
BEAT_S = 1.0
"""Between two meetings."""
WORKING, FAILED = 1, 2


def patiently(
    action: Callable[[], T], failed: Callable[[T], bool], stop: Callable[[], None], coordinator: Coordinator
) -> T:
    """Run `action` on every rank; its result on this one, once it has ended on all, whatever the deadline of a call
    is. Collective.

    Once it has `failed` on a rank, `stop` is called on the others, which should end theirs. It has deadlines of its own
    and raises nothing.
    """
    ended: SimpleQueue[T] = SimpleQueue()
    threading.Thread(target=lambda: ended.put(action()), name="long work", daemon=True).start()
    results: list[T] = []
    while True:
        if not results:
            with suppress(Empty):
                results.append(ended.get(timeout=BEAT_S))
        own = (FAILED if failed(results[0]) else 0) if results else WORKING
        [every] = coordinator.union(bytes([own]))
        if not every & WORKING:
            return results[0]
        if every & FAILED and not results:
            stop()
