import threading
from types import SimpleNamespace

import pytest

from rlhf.config.schema.trainer import TrainerConfig
from rlhf.launch.evidence import AttemptResult, Ending, Hang, classify, describe_rank, first_cause, report
from rlhf.launch.hangs import frames_of, shown, waits_for_peers
from rlhf.launch.interface import RankExit
from rlhf.launch.watchdog import Watchdog
from rlhf.ranks.status import StatusWriter, read_statuses, rename_stacks, stacks_file

SAVE_S = 900.0
LOOP = {"step.begin": 1, "rollout.before": 20, "rollout.after": 4, "update.before": 30}
ALARM_FREE_S = 4 * 3600


class Machine:
    """A watchdog with a simulated clock; `wait` checks the watchdog at every second."""

    def __init__(self, nproc: int = 1, **settings) -> None:
        self.watchdog = Watchdog(TrainerConfig(**settings), SAVE_S)
        self.ranks = list(range(nproc))
        self.watchdog.start(self.ranks)
        self.now, self.stamp = 1000.0, 0.0
        self.step, self.of_step = 1, set()

    def event(self, event: str, *ranks: int, again: bool = False) -> None:
        """Let the ranks announce `event`: in the next step if they did before in this step, unless `again`."""
        self.stamp += 1
        for rank in ranks or self.ranks:
            if (rank, event) in self.of_step and not again:
                self.step, self.of_step = self.step + 1, set()
            self.of_step.add((rank, event))
            self.watchdog.observe(rank, event, self.stamp, self.now, self.step)

    def save(self, event: str | None, rank: int = 0) -> None:
        self.stamp += 1
        self.watchdog.observe_save(rank, event, self.stamp, self.now)

    def wait(self, seconds: int):
        """Let up to `seconds` pass, and return what is overdue as soon as anything is."""
        for _ in range(seconds):
            self.now += 1
            for save in (False, True):
                found, moving = self.watchdog.overdue(self.now, self.ranks, save=save)
                if found and not moving:
                    return found
        return []

    def loop(self, steps: int, **other: int) -> None:
        for _ in range(steps):
            for event, seconds in (LOOP | other).items():
                self.event(event)
                assert self.wait(seconds) == []


def test_a_set_deadline_holds_for_every_phase_from_the_first_event():
    machine = Machine(watchdog_timeout_s=30.0)
    assert machine.wait(3600) == []
    machine.event("rollout.before")
    assert machine.wait(30) == []
    (late,) = machine.wait(1)
    assert (late.rank, late.phase, late.seconds, late.deadline_s) == (0, "rollout.before", 31.0, 30.0)
    assert late.origin == "trainer.watchdog_timeout_s"


def test_a_start_that_takes_too_long():
    machine = Machine(watchdog_timeout_s=30.0, watchdog_first_timeout_s=600.0)
    assert machine.wait(600) == []
    machine.event("start")
    assert machine.wait(600) == []
    (late,) = machine.wait(1)
    assert (late.phase, late.origin) == ("start", "trainer.watchdog_first_timeout_s")


def test_learned_deadlines_are_per_phase():
    machine = Machine()
    machine.loop(1, **{"update.before": 100})
    machine.loop(2)
    machine.event("rollout.before")
    (late,) = machine.wait(ALARM_FREE_S)
    assert (late.deadline_s, late.origin) == (300.0, "learned: this phase took at most 20 s")
    machine.event("update.before")
    (late,) = machine.wait(ALARM_FREE_S)
    assert (late.deadline_s, late.seconds) == (500.0, 501.0)


def test_a_phase_seen_too_rarely_has_the_first_deadline():
    machine = Machine()
    machine.loop(2)
    machine.event("rollout.before")
    (late,) = machine.wait(ALARM_FREE_S)
    assert (late.deadline_s, late.origin) == (3600.0, "trainer.watchdog_first_timeout_s")


def test_a_phase_is_learned_over_steps_and_not_within_one():
    """Three short resets of environments gave the first generation of episodes, the same phase, 300 s."""
    machine = Machine()
    for _ in range(3):
        machine.event("rollout.before")
        for _ in range(4):
            machine.event("env.recorded", again=True)
            assert machine.wait(1) == []
        machine.event("env.recorded", again=True)
        assert machine.wait(900) == []
        machine.event("rollout.after")
    machine.event("env.recorded")
    (late,) = machine.wait(ALARM_FREE_S)
    assert (late.deadline_s, late.phase) == (4500.0, "env.recorded")


def test_one_occurrence_on_many_ranks_is_one_occurrence():
    """Longer answers in the second evaluation were called a hang, again after each restart."""
    machine = Machine(8)
    for seconds in (70, 420):
        machine.loop(10)
        machine.event("evaluation.before")
        assert machine.wait(seconds) == []
        machine.event("evaluation.after")


def test_slow_evaluations_raise_no_alarm():
    machine = Machine()
    for _ in range(5):
        machine.loop(10)
        machine.event("evaluation.before")
        assert machine.wait(2000) == []
        machine.event("evaluation.after")


def test_learned_deadlines_follow_the_slowest_rank():
    machine = Machine(2)
    for _ in range(3):
        machine.event("update.before")
        machine.wait(10)
        machine.event("update.after", 0)
        machine.wait(90)
        machine.event("update.after", 1)
    machine.event("update.before")
    assert machine.wait(500) == []
    assert [late.deadline_s for late in machine.wait(1)] == [500.0, 500.0]


def test_learned_deadlines_survive_a_restart():
    machine = Machine()
    machine.loop(3)
    machine.save("commit.fsync")  # a crash ends this save
    machine.watchdog.start(machine.ranks)
    assert machine.wait(1000) == []
    machine.event("start")
    assert machine.wait(1000) == []
    machine.event("rollout.before")
    (late,) = machine.wait(ALARM_FREE_S)
    assert late.deadline_s == 300.0


def test_a_rank_may_wait_for_a_rank_within_its_deadline():
    """Rank 1 may wait in a brief phase while the driver writes metrics. If both exceed their deadlines, the run
    hangs, and the driver's phase is the older one."""
    machine = Machine(2)
    for _ in range(3):
        machine.loop(1)
        machine.event("metrics.before", 0)
        machine.wait(150)
    machine.event("evaluation.after")
    machine.event("metrics.before", 0)
    machine.wait(1)
    machine.event("step.begin", 1)
    assert machine.wait(740) == []
    assert [(late.rank, late.phase) for late in machine.wait(20)] == [(0, "metrics.before"), (1, "step.begin")]


def test_a_rank_that_has_exited_does_not_delay_an_alarm():
    machine = Machine(2, watchdog_timeout_s=10.0)
    machine.event("update.after")
    machine.wait(5)
    machine.event("step.begin", 1)
    machine.ranks = [0]
    assert [late.rank for late in machine.wait(7)] == [0]


def test_an_event_that_comes_again_is_progress():
    machine = Machine(watchdog_timeout_s=10.0)
    for _ in range(5):
        machine.event("update.mid")
        assert machine.wait(9) == []


@pytest.mark.parametrize("event", ["commit.before", "commit.fsync", "rollback.before"])
def test_saves_and_loads_in_the_loop_have_the_checkpoints_deadline(event):
    machine = Machine(watchdog_timeout_s=10.0)
    machine.event("step.begin")
    machine.event(event)
    assert machine.wait(int(SAVE_S)) == []
    (late,) = machine.wait(1)
    assert (late.origin, late.save) == ("checkpoint.timeout_s", False)


def test_hangs_of_the_loop_and_of_a_background_save_are_found_separately():
    machine = Machine(watchdog_timeout_s=100.0)
    machine.event("step.begin")
    machine.save("commit.fsync")
    for _ in range(30):
        machine.event("update.mid")
        assert machine.wait(30) == []
    (late,) = machine.wait(1)
    assert (late.phase, late.save, late.deadline_s) == ("commit.fsync", True, SAVE_S)

    machine = Machine(watchdog_timeout_s=100.0)
    machine.event("step.begin")
    for _ in range(10):
        machine.save("commit.fsync")
        assert machine.wait(10) == []
    (late,) = machine.wait(1)
    assert (late.phase, late.save) == ("step.begin", False)


def test_no_save_under_way_is_never_late():
    machine = Machine()
    machine.save("commit.published")
    machine.save(None)
    machine.event("evaluation.before")
    assert machine.wait(3599) == []


def test_time_without_checks_by_the_watchdog_does_not_count():
    machine = Machine(watchdog_timeout_s=30.0)
    machine.event("rollout.before")
    machine.wait(10)
    machine.now += 100_000  # the machine slept, or the supervisor was stopped
    assert machine.wait(15) == []
    assert machine.wait(10)


def test_status_keeps_the_loop_and_the_save_behind_it_apart(tmp_path):
    writer = StatusWriter(tmp_path, 0)
    writer.event(3, "step.begin")

    def in_a_thread(*events: str) -> int:
        thread = threading.Thread(target=lambda: [writer.event(9, event) for event in events])
        thread.start()
        thread.join()
        assert thread.ident is not None
        return thread.ident

    in_a_thread("commit.trash")  # housekeeping, no save
    assert read_statuses(tmp_path)[0].save is None
    saving = in_a_thread("commit.before", "commit.fsync")
    writer.event(3, "update.mid")
    status = read_statuses(tmp_path)[0]
    assert (status.step, status.event, status.thread) == (3, "update.mid", threading.get_ident())
    assert status.save
    assert (status.save.event, status.save.thread) == ("commit.fsync", saving)
    in_a_thread("commit.before", "commit.published", "commit.after")
    assert read_statuses(tmp_path)[0].save is None
    writer.error("crash", "boom")
    in_a_thread("commit.before")
    error = read_statuses(tmp_path)[0].error
    assert error
    assert error.message == "boom"


def test_an_event_that_comes_often_is_noted_ten_times_a_second(tmp_path, monkeypatch):
    clock = iter([100.0, 100.5, 100.55, 100.7, 100.71])
    monkeypatch.setattr("rlhf.ranks.status.time", SimpleNamespace(monotonic=lambda: next(clock)))
    writer = StatusWriter(tmp_path, 0)
    noted = []
    for event in ("update.mid", "update.mid", "update.mid", "update.after"):
        writer.event(3, event)
        noted.append(read_statuses(tmp_path)[0].time)
    assert noted == [100.5, 100.5, 100.7, 100.71]


DUMP = """Thread 0x00007f8e3b7fe640 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f8e40a50740 (most recent call first):
  File "/venv/torch/distributed/distributed_c10d.py", line 3 in all_gather
  File "/venv/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/home/me/rlhf/ranks/gloo.py", line 33 in gather
"""


def test_frames_of_a_thread_are_read_from_a_stack_dump():
    assert frames_of(DUMP, 0x7F8E3B7FE640)[0] == 'File "/usr/lib/python3.11/threading.py", line 327 in wait'
    assert len(frames_of(DUMP + DUMP, 0x7F8E40A50740)) == 3
    assert frames_of(DUMP, 0x7F8E) == frames_of("", 0x7F8E40A50740) == []


def test_stacks_show_whether_a_rank_waits_for_peers():
    waiting = frames_of(DUMP, 0x7F8E40A50740)
    kernel = ['File "/venv/torch/_ops.py", line 1 in __call__', 'File "/venv/torch/_pytree.py", line 1 in unflatten']
    assert waits_for_peers(waiting)
    assert waits_for_peers(kernel + waiting)
    assert not waits_for_peers([kernel[0], 'File "/home/me/reward.py", line 7 in score', *waiting])
    assert not waits_for_peers(frames_of(DUMP, 0x7F8E3B7FE640))
    assert not waits_for_peers([])
    assert shown(kernel + waiting, 2) == [kernel[0], waiting[2]]


def test_stacks_of_a_hang_outlive_the_next_attempt(tmp_path):
    for number in (1, 2):
        StatusWriter(tmp_path, 0)
        stacks_file(tmp_path, 0).write_text(f"stacks {number}")
        (kept,) = rename_stacks(tmp_path)
        assert kept.name == f"hang_{number}_rank_0.txt"
    assert (tmp_path / "status/hang_1_rank_0.txt").read_text() == "stacks 1"


def test_evidence_of_a_hang():
    hang = Hang(1, "no progress for 12 s after rollout.before (deadline 10 s)", {0: ["in gather"], 1: ["in solve"]}, [])
    attempt = AttemptResult({0: RankExit(-9), 1: RankExit(-9)}, (0, 1), frozenset({0, 1}), hang)
    assert classify(attempt, nproc=2, stop_requested=False) is Ending.CRASH
    assert first_cause(attempt, {}) == 1
    assert "hung, no progress for 12 s after rollout.before" in describe_rank(1, attempt, {})
    text = report(attempt, 2, {}, None, TrainerConfig())
    assert text.index("rank 1 hangs here:\n    in solve") < text.index("rank 0 is here:\n    in gather")
    stuck = AttemptResult({0: RankExit(-9)}, (0,), frozenset({0, 1}), hang)
    assert "survived SIGKILL" in describe_rank(1, stuck, {})
