import re
import threading
import time
from collections.abc import Callable

import pytest

from rlhf.checkpoint.remote import retries
from rlhf.checkpoint.remote.retries import Retries, Stopped, in_threads

DEADLINE_S = 120.0


def failing(times: int) -> Callable[[], str]:
    """Return an action that succeeds after `times` failures."""
    left = [times]

    def action() -> str:
        left[0] -= 1
        if left[0] >= 0:
            raise ConnectionError("no route to host\nand much more")
        return "done"

    return action


@pytest.fixture(autouse=True)
def waits(monkeypatch, caplog) -> Callable[[], list[tuple[int, float]]]:
    """Return a function that lists every wait so far: the failures in a row before it, and its seconds."""
    monkeypatch.setattr(retries, "FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(retries, "LONGEST_WAIT_S", 0.004)
    found = r"failed \((\d+) in a row\): ConnectionError: no route to host. Next try in (\S+) s"
    return lambda: [(int(row), float(wait)) for row, wait in re.findall(found, caplog.text)]


class Clock:
    """Replaces `retries.time`; its time passes only when a test says so."""

    def __init__(self) -> None:
        self._now, self._looks, self._looked = 0.0, 0, threading.Condition()

    def monotonic(self) -> float:
        with self._looked:
            self._looks += 1
            self._looked.notify_all()
            return self._now

    def passes(self, seconds: float) -> None:
        with self._looked:
            self._now += seconds

    def passes_before_eyes(self, seconds: float) -> None:
        """Let time pass, and return once a thread has read the new time."""
        with self._looked:
            self._now += seconds
            looks = self._looks
            assert self._looked.wait_for(lambda: self._looks > looks, DEADLINE_S)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    monkeypatch.setattr(retries, "time", Clock())
    monkeypatch.setattr(retries, "FIRST_WAIT_S", 0.0)
    monkeypatch.setattr(retries, "POLL_S", 0.01)
    return retries.time


def test_waits_double_up_to_the_longest_and_begin_again_after_a_success(waits):
    there = Retries("there", stalled_s=DEADLINE_S)
    assert there.call("a", failing(5)) == there.call("b", failing(1)) == "done"
    assert waits() == [(1, 0.001), (2, 0.002), (3, 0.004), (4, 0.004), (5, 0.004), (1, 0.001)]
    assert there.failures == 6


def test_one_wait_for_all_threads_that_fail_together(waits, monkeypatch):
    monkeypatch.setattr(retries, "FIRST_WAIT_S", 3600.0)
    monkeypatch.setattr(retries, "LONGEST_WAIT_S", 3600.0)
    there, together = Retries("there", stalled_s=DEADLINE_S), threading.Barrier(4)

    def action() -> None:
        together.wait(DEADLINE_S)
        raise ConnectionError("no route to host")

    def run() -> None:
        with pytest.raises(Stopped):
            in_threads([lambda: there.call("a", action)] * 4, 4)

    runner = threading.Thread(target=run)
    runner.start()
    end = time.monotonic() + DEADLINE_S
    while there.failures < 4 and time.monotonic() < end:
        time.sleep(0.01)
    there.stop()
    runner.join(DEADLINE_S)
    assert not runner.is_alive()
    assert waits() == [(1, 3600.0)]


def test_hurry_ends_the_wait_before_a_retry(monkeypatch):
    monkeypatch.setattr(retries, "FIRST_WAIT_S", 3600.0)
    monkeypatch.setattr(retries, "LONGEST_WAIT_S", 3600.0)
    there, results = Retries("there", stalled_s=DEADLINE_S), []
    runner = threading.Thread(target=lambda: results.append(there.call("a", failing(1))), daemon=True)
    runner.start()
    end = time.monotonic() + DEADLINE_S
    while not results and time.monotonic() < end:
        there.hurry()
        time.sleep(0.01)
    assert results == ["done"]


def test_a_final_error_is_raised_without_a_retry(waits):
    there = Retries("there", stalled_s=DEADLINE_S)
    with pytest.raises(ConnectionError):
        there.call("a", failing(1), final=(OSError,))
    assert there.failures == 0


def test_giving_up_after_so_long_without_a_success(clock):
    def action() -> None:
        clock.passes(0.2)
        raise ConnectionError("no route to host")

    there = Retries("there", stalled_s=DEADLINE_S, give_up_s=0.5)
    with pytest.raises(ConnectionError):
        there.call("a", action)
    assert there.failures == 2


@pytest.mark.parametrize("moves", [False, True])
def test_a_stalled_call_fails_and_a_progressing_call_does_not(moves, clock):
    there, release = Retries("there", stalled_s=1.0), threading.Event()
    calls = []

    def action() -> str:
        calls.append(1)
        if len(calls) > 1:
            return "done"
        if not moves:
            clock.passes_before_eyes(1.5)
            return str(release.wait(DEADLINE_S))
        for _ in range(10):
            clock.passes_before_eyes(0.15)
            there.beat()
        return "done"

    assert there.call("a", action) == "done"
    release.set()
    assert there.failures == (0 if moves else 1)


def test_a_call_that_hangs_has_failed_while_others_move(clock):
    """Earlier, the progress of one call counted as progress of all calls."""
    there, begun, again, release = Retries("there", stalled_s=0.3), *(threading.Event() for _ in range(3))
    calls = []

    def hangs() -> None:
        calls.append(1)
        begun.set()
        if len(calls) == 1:
            release.wait(DEADLINE_S)
        again.set()

    def moves() -> None:
        assert begun.wait(DEADLINE_S)
        for _ in range(4):
            clock.passes_before_eyes(0.1)
            there.beat()
        assert again.wait(DEADLINE_S)

    in_threads([lambda: there.call("a", hangs), lambda: there.call("b", moves)], 2)
    release.set()
    assert (len(calls), there.failures) == (2, 1)


def test_a_call_is_given_up_when_it_comes_no_further(clock):
    """Earlier, a file that took longer than `give_up_s` was given up at its first error if no call had succeeded."""
    there, tries = Retries("there", stalled_s=DEADLINE_S, give_up_s=0.28), list[int]()

    def action(furthest: int) -> str:
        tries.append(0)
        for _ in range(min(6 * len(tries), furthest)):
            there.beat()
            clock.passes(0.06)
        if len(tries) < 3 or furthest < 12:
            raise ConnectionError("no route to host")
        return "done"

    assert there.call("further each time", lambda: action(100)) == "done"
    tries.clear()
    with pytest.raises(ConnectionError):
        there.call("no further", lambda: action(4))
    assert len(tries) == 2


def test_successes_of_other_calls_do_not_keep_a_failing_call_alive(monkeypatch):
    there, given_up = Retries("there", stalled_s=DEADLINE_S, give_up_s=0.3), threading.Event()

    def others() -> None:
        end = time.monotonic() + DEADLINE_S
        while not given_up.is_set():
            there.call("b", failing(0))
            assert time.monotonic() < end

    def fails() -> None:
        with pytest.raises(ConnectionError):
            there.call("a", failing(10**9))
        given_up.set()

    in_threads([fails, others], 2)


def test_stop_ends_a_call_that_hangs():
    there, begun, release = Retries("there", stalled_s=3600.0), threading.Event(), threading.Event()
    threading.Thread(target=lambda: begun.wait(DEADLINE_S) and there.stop(), daemon=True).start()
    with pytest.raises(Stopped):
        there.call("a", lambda: (begun.set(), release.wait(DEADLINE_S)))
    with pytest.raises(Stopped):
        there.call("b", failing(0))
    release.set()


def test_jobs_in_threads_end_at_the_first_error():
    done: list[int] = []

    def job(number: int) -> None:
        done.append(number)
        if number == 3:
            raise ValueError("the third")

    with pytest.raises(ValueError, match="the third"):
        in_threads([lambda n=n: job(n) for n in range(10)], 1)  # type: ignore[misc]
    assert done == [0, 1, 2, 3]
    in_threads([lambda n=n: job(n) for n in range(4, 8)], 3)  # type: ignore[misc]
    assert sorted(done[4:]) == [4, 5, 6, 7]
