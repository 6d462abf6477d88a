"""A run on two ranks, preempted in three ways one after the other, ends with the bits of an undisturbed run."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlhf.errors import EXIT_DONE, EXIT_REQUEUE
from tests.support.compare_runs import differences
from tests.support.forked_start import train_forked
from tests.support.interrupter import at
from tests.support.launching import Ended, copy_run, ranks, saved_steps, small
from tests.support.undisturbed import EXPORT, Undisturbed


@dataclass(frozen=True)
class Story:
    """The outcome of each start of one run."""

    run_dir: Path
    ends: list[Ended]
    newest: list[int]


@pytest.fixture(scope="module")
def story(tmp_path_factory, launches: ThreadPoolExecutor, undisturbed: Undisturbed, sums: Path) -> Story:
    folder = tmp_path_factory.mktemp("preempted")
    command = [*small(folder, "preempted", sums), "trainer.nproc=2", EXPORT]
    run_dir = folder / "rlhf" / "preempted"
    requests = [
        at("update.before", 2, "SIGTERM", to="supervisor"),
        at("rollout.after", 2, "SIGUSR1", to="supervisor"),
        at("update.before", 1, "SIGTERM", rank=1),
        {},
    ]

    def record() -> Story:
        ends, newest = [], []
        for environment in requests:
            ends.append(train_forked(command, environment))
            newest.append(saved_steps(run_dir)[0])
        return Story(run_dir, ends, newest)

    return launches.submit(record).result()


def test_each_request_saves_the_step_under_way_and_asks_to_be_requeued(story):
    assert [end.code for end in story.ends] == [EXIT_REQUEUE] * 3 + [EXIT_DONE], [end.output for end in story.ends]
    assert story.newest == [2, 4, 5, 7]
    for end, who in zip(story.ends, ("SIGTERM: ", "SIGUSR1: ", "A signal to the ranks: "), strict=False):
        assert f"{who}the ranks saved and left. The same command continues from {story.run_dir}" in end.output
        assert "Traceback" not in end.output


def test_the_finished_run_is_the_uninterrupted_one(story, undisturbed):
    # Promise 7.
    assert differences(undisturbed.run_dir(2), story.run_dir) == []


@pytest.mark.parametrize(("saved_by", "resumed_by"), [(2, 1), (1, 2)])
def test_resume_at_another_number_of_ranks(tmp_path, undisturbed, sums, saved_by, resumed_by):
    source = undisturbed.run_dir(saved_by)
    run_dir = copy_run(source, tmp_path / "rlhf" / "resharded", 3)
    end = ranks(tmp_path / "log", [*small(tmp_path, "resharded", sums), EXPORT], nproc=resumed_by)
    assert end.code == EXIT_DONE, end.output
    assert saved_steps(run_dir) == [7, 6, 3]
    assert f"was saved by {saved_by} rank" in end.output
