"""Phases of a rank, from its events and from what its parts report."""

import threading

from rlhf.ranks.status import SCORED, StatusWriter, read_statuses
from rlhf.tracking import phases
from rlhf.tracking.phases import Phases


class Recorder:
    def __init__(self) -> None:
        self.all: list[tuple[int, str, int, int]] = []

    def start(self, step: int, total: int) -> None:
        """Not of interest."""

    def update(self, step: int, metrics: object) -> None:
        """Not of interest."""

    def phase(self, rank: int, step: int, name: str, done: int, total: int) -> None:
        assert rank == 1
        self.all.append((step, name, done, total))


def test_a_step_and_an_evaluation(monkeypatch, tmp_path):
    monkeypatch.setattr(phases, "INTERVAL_S", 0.0)
    recorder = Recorder()
    of_rank = Phases(recorder, 1, StatusWriter(tmp_path, 1))
    of_rank.report("loading the weights")
    of_rank.event(0, "evaluation.before")
    of_rank.report("generating", 3, 4)
    of_rank.event(0, "rollout.begin")  # some engines emit this event; the phase is still the evaluation
    of_rank.report("reward", 0, 4)
    of_rank.event(0, SCORED)
    of_rank.event(0, "evaluation.after")
    of_rank.event(1, "step.begin")
    of_rank.report("generating", 4, 4)
    of_rank.event(1, "update.before")
    of_rank.report("actor update", 1, 2)
    of_rank.event(1, "update.mid")
    assert recorder.all == [
        (0, "loading the weights", 0, 0),
        (0, "first evaluation", 0, 0),
        (0, "first evaluation: generating", 3, 4),
        (0, "first evaluation: reward", 0, 4),
        (0, "first evaluation: reward", 1, 4),
        (1, "generating", 0, 0),
        (1, "generating", 4, 4),
        (1, "update", 0, 0),
        (1, "actor update", 1, 2),
    ]


def test_background_work_is_a_phase_only_while_the_loop_waits_for_it(tmp_path):
    recorder = Recorder()
    of_rank = Phases(recorder, 1, StatusWriter(tmp_path, 1))

    def behind(*calls) -> None:
        thread = threading.Thread(target=lambda: [call(*arguments) for call, *arguments in calls])
        thread.start()
        thread.join()

    of_rank.event(2, "update.before")
    behind((of_rank.report, "generating", 8, 8), (of_rank.event, 2, "commit.snapshot"))
    of_rank.event(3, "rollout.begin")
    behind((of_rank.report, "generating", 8, 8))
    assert recorder.all == [(2, "update", 0, 0), (3, "generating", 0, 0), (3, "generating", 8, 8)]


def test_counts_come_at_intervals_and_at_the_end(tmp_path):
    recorder = Recorder()
    of_rank = Phases(recorder, 1, StatusWriter(tmp_path, 1))
    of_rank.event(1, "step.begin")
    for done in range(1, 1001):
        of_rank.report("generating", done, 1000)
    assert len(recorder.all) < 20
    assert recorder.all[-1] == (1, "generating", 1000, 1000)
    phase = read_statuses(tmp_path)[1].phase
    assert phase is not None
    assert (phase.name, phase.done, phase.total) == ("generating", 1000, 1000), "other terminals read the status file"
