"""Retries calls over a network that may fail, hang or be down for hours.

Waits grow from try to try; all calls run in daemon threads, which never delay an exit.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from rlhf.errors import UserError

T = TypeVar("T")
log = logging.getLogger(__name__)
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 60.0
POLL_S = 0.5


class Stopped(Exception):
    """`Retries.stop` ended a call before its success."""


class _Try:
    """Counts the progress reports of one try. `last` is the time of the last report, or of the try's start."""

    def __init__(self) -> None:
        self.beats, self.last = 0, time.monotonic()


class Retries:
    """Retries calls to `remote` until they succeed. All threads that call one remote share an instance.

    The wait after a failure starts at FIRST_WAIT_S and doubles up to LONGEST_WAIT_S; a success resets it. Each wait is
    logged once. A call without a `beat` for `stalled_s` seconds counts as failed, and its daemon thread is abandoned.
    A call raises its last error if for `give_up_s` seconds no try gets further (makes more beats) than an earlier try.
    """

    def __init__(self, remote: str, *, stalled_s: float, give_up_s: float | None = None) -> None:
        self.failures = 0
        self.remote, self._stalled_s, self._give_up_s = remote, stalled_s, give_up_s
        self._changed = threading.Condition()
        self._in_a_row, self._next_try = 0, 0.0
        self._running = threading.local()
        """The `_Try` of the call that runs in this thread."""
        self._stopped = False

    def call(self, what: str, action: Callable[[], T], final: tuple[type[Exception], ...] = ()) -> T:
        """Return the result of `action`, retried; raise Stopped after `stop`, and errors of the types `final` at
        once."""
        furthest = _Try()
        while True:
            self._wait()
            this_try = _Try()
            try:
                result = self._watch(what, action, this_try)
            except Exception as error:
                if isinstance(error, (Stopped, *final)):
                    raise
                if this_try.beats > furthest.beats:
                    furthest = this_try
                if self._give_up_s is not None and time.monotonic() - furthest.last >= self._give_up_s:
                    raise
                self._failed(what, error)
            else:
                with self._changed:
                    self._in_a_row = 0
                return result

    def beat(self) -> None:
        """Report progress of the action in this thread, if any; raises Stopped after `stop`."""
        this_try: _Try | None = getattr(self._running, "this_try", None)
        if this_try is not None:
            this_try.beats, this_try.last = this_try.beats + 1, time.monotonic()
        if self._stopped:
            raise Stopped

    def hurry(self) -> None:
        """End the present wait and retry now."""
        with self._changed:
            self._next_try = 0.0
            self._changed.notify_all()

    def stop(self) -> None:
        """Make every present and future call raise Stopped soon."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _wait(self) -> None:
        with self._changed:
            while not self._stopped and (left := self._next_try - time.monotonic()) > 0:
                self._changed.wait(left)
        self.beat()

    def _watch(self, what: str, action: Callable[[], T], this_try: _Try) -> T:
        """Run `action` in a new thread, so that a hanging connection does not block the caller."""
        outcome: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

        def run() -> None:
            self._running.this_try = this_try
            try:
                outcome.put((action(), None))
            except BaseException as error:  # the waiting thread raises it again
                outcome.put((None, error))

        threading.Thread(target=run, name=f"remote: {what}", daemon=True).start()
        while True:
            try:
                result, error = outcome.get(timeout=min(POLL_S, self._stalled_s))
            except Empty:
                if self._stopped:
                    raise Stopped from None
                if time.monotonic() - this_try.last >= self._stalled_s:
                    raise TimeoutError(f"no progress for {self._stalled_s:g} s") from None
                continue
            if error is not None:
                raise error
            return result

    def _failed(self, what: str, error: Exception) -> None:
        with self._changed:
            self.failures += 1
            now = time.monotonic()
            if now < self._next_try:  # another thread has logged this wait
                return
            self._in_a_row += 1
            wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** min(self._in_a_row - 1, 30))
            self._next_try, number = now + wait_s, self._in_a_row
        log.warning(
            "%s: %s failed (%d in a row): %s. Next try in %g s.", self.remote, what, number, one_line(error), wait_s
        )


def one_line(error: BaseException) -> str:
    """Return an error's type and first line, because errors of some clients are pages long."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


@contextmanager
def silence_as_warning(url: str) -> Iterator[None]:
    """Log a warning for an error of the remote in the block; raise UserError unchanged."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        log.warning("%s does not answer (%s); training goes on and tries again.", url, one_line(error))


def in_threads(jobs: Iterable[Callable[[], None]], threads: int) -> None:
    """Run `jobs` in order in daemon threads, `threads` at a time. Stop at the first error, and raise the error."""
    todo: SimpleQueue[Callable[[], None]] = SimpleQueue()
    errors: list[BaseException] = []
    for job in jobs:
        todo.put(job)

    def work() -> None:
        while not errors:
            try:
                job = todo.get_nowait()
            except Empty:
                return
            try:
                job()
            except BaseException as error:  # raised again below
                errors.append(error)

    workers = [threading.Thread(target=work, name="remote", daemon=True) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]
