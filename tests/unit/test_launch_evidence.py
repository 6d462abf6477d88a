import signal
from pathlib import Path

import pytest

from rlhf.config.schema.trainer import TrainerConfig
from rlhf.launch.evidence import (
    AttemptResult,
    Ending,
    Hang,
    cause_of,
    classify,
    describe_crash,
    first_cause,
    furthest_step,
    report,
    user_error,
)
from rlhf.launch.interface import RankExit
from rlhf.ranks.status import RankError, RankStatus

KILLED = -signal.SIGKILL


def attempt(exits: dict[int, int], first: tuple[int, ...] = (), killed: tuple[int, ...] = ()) -> AttemptResult:
    return AttemptResult({rank: RankExit(code) for rank, code in exits.items()}, first, frozenset(killed))


@pytest.mark.parametrize(
    ("exits", "stop", "ending"),
    [
        ({0: 0, 1: 0}, False, Ending.DONE),
        ({0: 0, 1: 0}, True, Ending.DONE),
        ({0: 1, 1: KILLED}, False, Ending.CRASH),
        ({0: 0}, False, Ending.CRASH),
        ({0: KILLED, 1: 2}, False, Ending.USER_ERROR),
        ({0: 2, 1: KILLED}, True, Ending.USER_ERROR),
        ({0: 75, 1: 1}, False, Ending.REQUEUE),
        ({0: 1, 1: KILLED}, True, Ending.REQUEUE),
    ],
)
def test_the_exits_of_ranks_decide_how_the_attempt_ended(exits, stop, ending):
    assert classify(attempt(exits), nproc=2, stop_requested=stop) is ending


def test_the_signal_is_the_cause_and_the_peers_exception_the_effect():
    lost = RankStatus(5, "update", 10.0, RankError("crash", "connection reset", ""))
    gone = RankStatus(5, "update", 9.0, None)
    assert first_cause(attempt({0: 1, 1: KILLED}, first=(0, 1)), {0: lost, 1: gone}) == 1


def test_the_earliest_error_is_the_cause():
    errors = {rank: RankStatus(5, "update", at, RankError("crash", "x", "")) for rank, at in {0: 10.2, 1: 10.1}.items()}
    assert first_cause(attempt({0: 1, 1: 1}, first=(0, 1)), errors) == 1


def test_a_user_error_is_taken_from_the_rank_that_raised_it():
    statuses = {
        0: RankStatus(1, "a", 1.0, RankError("crash", "connection reset", "")),
        1: RankStatus(1, "a", 0.0, RankError("user", "data.train_files=x: no such file", "")),
    }
    assert user_error(attempt({0: 1, 1: 2}), statuses) == "data.train_files=x: no such file"
    assert "exit code 2" in user_error(attempt({0: 2}), {})


def test_the_crash_report_shows_exits_steps_events_and_errors():
    traceback = "\n".join(f"line {n}" for n in range(40))
    statuses = {
        0: RankStatus(7, "rollout.after", 2.0, None),
        1: RankStatus(7, "commit.rename", 1.0, RankError("crash", "RuntimeError: boom", traceback)),
    }
    ended, newest = attempt({1: 1, 0: KILLED}, first=(1,), killed=(0,)), Path("/runs/global_step_5")
    text = report(ended, 3, statuses, newest, TrainerConfig())
    assert "rank 0: killed by the supervisor, at step 7, last event rollout.after\n" in text
    assert "rank 1: exit code 1, at step 7, last event commit.rename  (the first to fail)" in text
    assert "rank 2: survived SIGKILL" in text
    assert "rank 1's error: RuntimeError: boom" in text
    assert "line 39" in text
    assert "line 24" not in text
    assert "The same command continues from /runs/global_step_5." in text
    text = report(ended, 3, statuses, newest, TrainerConfig(overwrite=True))
    assert "The same command without trainer.overwrite=true continues from /runs/global_step_5." in text
    assert furthest_step(statuses) == 7


def test_a_multi_line_message_is_reported_once_and_completely():
    message = "\n".join(["ValueError: no number", *(f"sample {n}" for n in range(30))])
    error = RankError("crash", message, f"Traceback:\n  frame\n{message}\n")
    text = report(attempt({0: 1}, first=(0,)), 1, {0: RankStatus(7, "update", 1.0, error)}, None, TrainerConfig())
    assert "rank 0's error: ValueError: no number\n" in text
    assert "    frame\n" in text
    assert all(text.count(f"sample {n}\n") == 1 for n in range(30))
    untraced = RankStatus(7, "update", 1.0, RankError("crash", message, ""))
    assert message in report(attempt({0: 1}, first=(0,)), 1, {0: untraced}, None, TrainerConfig())


def test_the_end_of_the_launcher_is_the_cause_unless_a_rank_failed_before():
    statuses = {0: RankStatus(7, "rollout.after", 2.0, None), 1: RankStatus(7, "update.mid", 1.0, None)}
    killed_rank = RankExit(KILLED, died_with="the launcher: SIGKILL")
    gone = AttemptResult({0: killed_rank, 1: killed_rank}, (), frozenset())
    assert describe_crash(gone, statuses).startswith("the launcher: SIGKILL, and its ranks")
    assert "rank 1: died with the launcher: SIGKILL" in report(gone, 2, statuses, None, TrainerConfig())
    late = AttemptResult({1: RankExit(3), 0: killed_rank}, (1,), frozenset())
    assert describe_crash(late, statuses) == "rank 1: exit code 3, at step 7, last event update.mid"
    assert "rank 0: died with the launcher" in report(late, 2, statuses, None, TrainerConfig())


def test_exit_codes_and_signals_are_described_in_words():
    assert str(RankExit(3)) == "exit code 3"
    assert "out-of-memory" in str(RankExit(KILLED))
    assert str(RankExit(-signal.SIGSEGV)) == "SIGSEGV"
    assert str(RankExit(-40)) == "signal 40"


def test_causes_are_equal_whatever_the_rank_the_step_and_the_numbers():
    def cause(rank: int, code: int, message: str = "", step: int = 1) -> str:
        error = RankError("crash", f"{message}\nmore", "") if message else None
        return cause_of(attempt({rank: code}, first=(rank,)), {rank: RankStatus(step, "update", 1.0, error)})

    assert cause(0, KILLED) == cause(1, KILLED, step=9)
    assert cause(0, 1, "OSError: disk 7 at 0x7f3a is gone") == cause(1, 1, "OSError: disk 12 at 0x11b is gone", step=9)
    assert len({cause(0, KILLED), cause(0, 1), cause(0, 1, "OSError: a"), cause(0, 1, "OSError: b")}) == 4
    hung = AttemptResult({0: RankExit(KILLED)}, (), frozenset({0}), Hang(0, "no progress", {}, []))
    assert cause_of(hung, {0: RankStatus(3, "update", 1.0, None)}) == "hang after update"
    assert "Checks of this node found:\n    error: disk: full" in report(
        hung, 1, {}, None, TrainerConfig(), ["error: disk: full"]
    )
