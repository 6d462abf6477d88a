"""Runs on two Ray nodes survive kills (with the same result) and lost nodes; mistakes end them at once."""

from collections.abc import Iterator

import pytest

from rlhf.errors import EXIT_DONE, EXIT_REQUEUE, EXIT_USER_ERROR
from tests.support.compare_runs import differences
from tests.support.hanger import hangs, wait_for
from tests.support.interrupter import at
from tests.support.launching import saved_steps, small
from tests.support.ray_cluster import DEADLINE_S, Cluster, needs_ray, ray_cluster
from tests.support.refusals import says
from tests.support.undisturbed import EXPORT

pytestmark = [needs_ray, pytest.mark.slow, pytest.mark.timeout(1200)]

# The undisturbed run is on one machine with whole replicas. `dp_replicate=2` gives two nodes whole replicas, too.
TWO_NODES = ("trainer.nproc=1", "trainer.nnodes=2", "backend.dp_replicate=2")


@pytest.fixture(scope="module")
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ray_cluster(tmp_path_factory.mktemp("ray")) as made:
        yield made


def test_a_run_on_two_nodes_equals_the_supervisors(ray, sums, tmp_path, undisturbed):
    # With `overwrite`, a launch empties the directory.
    (tmp_path / "rlhf" / "run" / "global_step_9").mkdir(parents=True)
    end = ray.train([*small(tmp_path, "run", sums), EXPORT, *TWO_NODES, "trainer.overwrite=true"], {}, tmp_path / "log")
    assert end.code == EXIT_DONE
    assert differences(undisturbed.run_dir(2), tmp_path / "rlhf" / "run") == []


def test_ray_restarts_after_a_rank_was_killed(ray, sums, tmp_path, undisturbed):
    killed = at("update.before", 5, "SIGKILL", rank=1, once=tmp_path / "killed")
    arguments = [*small(tmp_path, "run", sums), EXPORT, *TWO_NODES, "trainer.overwrite=true"]
    end = ray.train(arguments, killed, tmp_path / "log")
    assert end.code == EXIT_DONE
    assert (tmp_path / "killed").exists()
    assert "global_step_3" in end.output  # the directory was deleted once, so the second attempt resumed
    assert differences(undisturbed.run_dir(2), tmp_path / "rlhf" / "run") == []


def test_a_users_mistake_that_only_the_nodes_find_ends_the_run_at_once(ray, sums, tmp_path):
    (tmp_path / "rlhf").touch()  # in the way of the run directory
    end = ray.train([*small(tmp_path, "run", sums), *TWO_NODES], {}, tmp_path / "log")
    assert end.code == EXIT_USER_ERROR
    says(end.output.rpartition("\nerror: ")[2], "Cannot create the run directory", "trainer.default_local_dir")


def test_sigterm_to_the_command_saves_and_the_next_command_continues(ray, sums, tmp_path, undisturbed):
    arguments = [*small(tmp_path, "run", sums), EXPORT, *TWO_NODES]
    process = ray.start(arguments, hangs(tmp_path, ("update.before", 2, 0, "pause")), tmp_path / "log")
    wait_for(tmp_path / "hung_0")
    process.terminate()
    assert process.wait(DEADLINE_S) == EXIT_REQUEUE, (tmp_path / "log").read_text()
    assert saved_steps(tmp_path / "rlhf" / "run") == [2]
    assert ray.train(arguments, {}, tmp_path / "second_log").code == EXIT_DONE
    assert differences(undisturbed.run_dir(2), tmp_path / "rlhf" / "run") == []


def test_a_notice_of_preemption_saves_and_the_run_continues_on_another_node(ray, sums, tmp_path, undisturbed):
    arguments = [*small(tmp_path, "run", sums), EXPORT, *TWO_NODES]
    process = ray.start(arguments, hangs(tmp_path, ("update.before", 2, 0, "pause")), tmp_path / "log")
    wait_for(tmp_path / "hung_0")
    ray.do("preempt")
    ray.do("add")
    assert process.wait(DEADLINE_S) == EXIT_DONE, (tmp_path / "log").read_text()
    assert "global_step_2" in (tmp_path / "log").read_text()
    assert differences(undisturbed.run_dir(2), tmp_path / "rlhf" / "run") == []


def test_a_run_goes_on_with_one_node_after_the_other_is_lost(ray, sums, tmp_path):
    arguments = [
        *small(tmp_path, "run", sums),
        "trainer.nnodes=2",
        "launcher.min_nodes=1",
        "launcher.start_timeout_s=20",
    ]
    process = ray.start(arguments, hangs(tmp_path, ("update.before", 5, 0, "pause")), tmp_path / "log")
    wait_for(tmp_path / "hung_0")
    ray.do("lose")
    assert process.wait(DEADLINE_S) == EXIT_DONE, (tmp_path / "log").read_text()
    assert saved_steps(tmp_path / "rlhf" / "run") == [7, 6, 3]
    says((tmp_path / "log").read_text(), "2 ranks", "1 rank")
