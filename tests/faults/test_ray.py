"""Runs on two Ray nodes survive kills (with the same result) and lost nodes; mistakes end them at once."""

from collections.abc import Iterator

import pytest

from rlhf.errors import EXIT_DONE, EXIT_REQUEUE, EXIT_USER_ERROR
from tests.support.compare_runs import differences
from tests.support.forked_start import train_forked
from tests.support.hanger import hangs, wait_for
from tests.support.holder import holds
from tests.support.interrupter import at
from tests.support.launching import saved_steps, small
from tests.support.ray_cluster import DEADLINE_S, Cluster, needs_ray, occupied, ray_cluster
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


def test_a_machine_that_another_program_uses_is_not_waited_for(ray, sums, tmp_path):
    killed = at("update.before", 2, "SIGKILL", rank=0, once=tmp_path / "killed")
    elastic = ["trainer.nnodes=2", "launcher.min_nodes=1", "trainer.max_restarts=1"]
    elastic += [f"launcher.start_timeout_s={2 * DEADLINE_S}"]
    with occupied(ray):
        end = ray.train([*small(tmp_path, "run", sums), *elastic], killed, tmp_path / "log")
    assert end.code == EXIT_DONE
    assert (tmp_path / "killed").exists()
    says(end.output, "1 rank")


def test_a_run_shrinks_and_grows_with_the_cluster_and_repeats_only_the_lost_step(ray, sums, tmp_path):
    """The twin has the same sizes and no failure: steps 1 to 3 on two ranks, 4 and 5 on one, 6 and 7 on two."""
    same = [EXPORT, "backend.dp_replicate=1"]
    elastic = ["trainer.nproc=1", "trainer.nnodes=2", "launcher.min_nodes=1", "launcher.start_timeout_s=20"]
    held = holds(tmp_path, ("update.before", 4, 2), ("update.before", 2, 1))
    process = ray.start([*small(tmp_path, "run", sums), *same, *elastic], held, tmp_path / "log")
    wait_for(tmp_path / "held_0")  # in step 4
    wait_for(tmp_path / "rlhf" / "run" / "global_step_3")
    ray.do("lose")
    wait_for(tmp_path / "held_1")  # in step 5
    ray.do("add")
    assert process.wait(DEADLINE_S) == EXIT_DONE, (tmp_path / "log").read_text()
    assert saved_steps(tmp_path / "rlhf" / "run") == [7, 6, 5]  # 5 because of the growth

    def twin(nproc: int, environment: dict[str, str]) -> int:
        return train_forked([*small(tmp_path, "twin", sums), *same, f"trainer.nproc={nproc}"], environment).code

    assert twin(2, at("update.before", 3, "SIGTERM")) == EXIT_REQUEUE
    assert twin(1, at("update.before", 2, "SIGTERM")) == EXIT_REQUEUE
    assert twin(2, {}) == EXIT_DONE
    assert differences(tmp_path / "rlhf" / "twin", tmp_path / "rlhf" / "run") == []


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
