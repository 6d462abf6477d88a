"""Runs under SLURM's own daemons, on two nodes: signals, requeues, kills and mistakes end in the undisturbed run."""

import re
import sys
from collections.abc import Iterator

import pytest

from rlhf.errors import EXIT_CRASHED, EXIT_DONE, EXIT_USER_ERROR
from tests.support.compare_runs import differences
from tests.support.forked_start import train_forked
from tests.support.hanger import hangs, wait_for
from tests.support.interrupter import at
from tests.support.launching import DEADLINE_S, ROOT, Ended, saved_steps, small
from tests.support.refusals import says
from tests.support.slurm_cluster import Cluster, cluster, needs_slurm
from tests.support.undisturbed import EXPORT

pytestmark = [needs_slurm, pytest.mark.slow]

# The undisturbed run is on one machine with whole replicas. `dp_replicate=2` gives two nodes whole replicas, too.
ONE_NODE, TWO_NODES = ("trainer.nproc=2",), ("trainer.nproc=1", "trainer.nnodes=2", "backend.dp_replicate=2")
"""Settings for two ranks: on one node under the supervisor, on two nodes started by srun."""
both_ways = pytest.mark.parametrize("machines", [ONE_NODE, TWO_NODES], ids=["supervisor", "srun"])


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("slurm")) as made:
        yield made


def launch(slurm: Cluster, arguments: list[str], environment: dict[str, str] | None = None) -> Ended:
    """Run python -m rlhf.launch.slurm in the cluster's folder."""
    variables = {**slurm.environment, "PYTHONPATH": str(ROOT), **(environment or {})}
    return train_forked(arguments, variables, folder=slurm.folder, module="rlhf.launch.slurm.__main__")


def submit(slurm: Cluster, arguments: list[str], environment: dict[str, str] | None = None) -> str:
    """Submit a job and return its number."""
    end = launch(slurm, arguments, environment)
    assert end.code == EXIT_DONE, end.output
    return re.search(r"Submitted job (\d+)", end.output)[1]


def ended(slurm: Cluster, number: str) -> tuple[str, str, str]:
    """Return state, exit code and restarts of a job after its end. pytest shows the log of a test that fails."""
    job = slurm.wait(number, DEADLINE_S)
    sys.stdout.write(slurm.logs())
    return job["JobState"], job["ExitCode"], job["Restarts"]


@both_ways
def test_the_signal_before_the_time_limit_saves_and_requeues(slurm, sums, tmp_path, undisturbed, machines):
    warned = at("update.before", 2, "SIGUSR1", to="job", once=tmp_path / "warned")
    # With `overwrite`, the launch deletes the directory once, not at each attempt.
    number = submit(slurm, [*small(tmp_path, "run", sums), EXPORT, *machines, "trainer.overwrite=true"], warned)
    assert ended(slurm, number) == ("COMPLETED", "0:0", "1")
    assert (tmp_path / "warned").exists()
    assert differences(undisturbed.run_dir(2), tmp_path / "rlhf" / "run") == []
    assert not list(slurm.folder.glob("*.progress"))


def test_a_killed_rank_costs_no_requeue(slurm, sums, tmp_path, undisturbed):
    killed = at("update.before", 5, "SIGKILL", rank=1, once=tmp_path / "killed")
    number = submit(slurm, [*small(tmp_path, "run", sums), EXPORT, *TWO_NODES], killed)
    assert ended(slurm, number) == ("COMPLETED", "0:0", "0")
    assert (tmp_path / "killed").exists()
    assert differences(undisturbed.run_dir(2), tmp_path / "rlhf" / "run") == []


def test_a_killed_supervisor_is_started_again(slurm, sums, tmp_path, undisturbed):
    killed = at("update.before", 5, "SIGKILL", to="supervisor", once=tmp_path / "killed")
    number = submit(slurm, [*small(tmp_path, "run", sums), EXPORT, *ONE_NODE], killed)
    assert ended(slurm, number) == ("COMPLETED", "0:0", "0")
    assert (tmp_path / "killed").exists()
    assert differences(undisturbed.run_dir(2), tmp_path / "rlhf" / "run") == []


def test_a_preempted_job_saves_and_continues_later(slurm, sums, tmp_path, undisturbed):
    paused = hangs(tmp_path, ("update.before", 2, 0, "pause"))
    number = submit(slurm, [*small(tmp_path, "run", sums), EXPORT, *TWO_NODES, "--partition=low"], paused)
    wait_for(tmp_path / "hung_0")
    taken = slurm.run(["sbatch", "--partition=high", "--nodes=2", "--exclusive", "--wrap=true"])
    assert taken.returncode == 0, taken.stderr
    assert ended(slurm, number) == ("COMPLETED", "0:0", "1")
    assert differences(undisturbed.run_dir(2), tmp_path / "rlhf" / "run") == []


def test_a_users_mistake_that_only_the_nodes_find_ends_the_job(slurm, sums, tmp_path):
    (tmp_path / "rlhf").touch()  # in the way of the run directory
    number = submit(slurm, [*small(tmp_path, "run", sums), *TWO_NODES])
    assert ended(slurm, number) == ("FAILED", f"{EXIT_USER_ERROR}:0", "0")


def test_attempts_too_short_for_a_start_are_not_requeued_for_ever(slurm, sums, tmp_path):
    run_dir = tmp_path / "rlhf" / "run"
    number = submit(slurm, [*small(tmp_path, "run", sums), *ONE_NODE, "trainer.max_failures_per_step=2"])
    log = slurm.folder / f"rlhf-{number}.log"
    for attempt in (1, 2):  # each attempt gets the signal before its first step
        slurm.wait_until(number, lambda: log.exists() and log.read_text().count(str(run_dir / "run.log")) == attempt)  # noqa: B023
        slurm.run(["scancel", "--batch", "--signal=USR1", number])
    assert ended(slurm, number) == ("FAILED", f"{EXIT_CRASHED}:0", "1")
    assert saved_steps(run_dir) == []
    says(log.read_text(), "2 attempts in a row", "without a new checkpoint", "--time", "max_failures_per_step=2")
    assert not list(slurm.folder.glob("*.progress"))


def test_a_cancelled_job_stays_cancelled(slurm, sums, tmp_path):
    paused = hangs(tmp_path, ("update.before", 2, 0, "pause"))
    number = submit(slurm, [*small(tmp_path, "run", sums), *TWO_NODES], paused)
    wait_for(tmp_path / "hung_0")
    slurm.run(["scancel", number])
    assert ended(slurm, number)[0] == "CANCELLED"
    assert saved_steps(tmp_path / "rlhf" / "run") == [2]


def test_a_sweep_is_an_array_whose_tasks_continue_alone(slurm, sums, tmp_path, undisturbed):
    warned = at("update.before", 2, "SIGUSR1", to="job", once=tmp_path / "warned")
    sweep = [*small(tmp_path, "run", sums), EXPORT, *ONE_NODE, "-m", "trainer.seed=1,2", "--array-parallelism=1"]
    number = submit(slurm, sweep, warned)
    ends = [ended(slurm, f"{number}_{task}") for task in (0, 1)]
    assert ends == [("COMPLETED", "0:0", "1"), ("COMPLETED", "0:0", "0")]
    assert differences(undisturbed.run_dir(2), tmp_path / "rlhf" / "run-trainer.seed-1") == []
    assert saved_steps(tmp_path / "rlhf" / "run-trainer.seed-2")[0] == 7


def test_what_sbatch_rejects_is_one_message(slurm, sums, tmp_path):
    end = launch(slurm, [*small(tmp_path, "run", sums), "--partition=none"])
    assert end.code == EXIT_USER_ERROR
    says(end.output, "SLURM rejected the job", "invalid partition")
    assert "Traceback" not in end.output


def test_a_job_without_enough_gpus_is_rejected_before_it_waits(slurm, sums, tmp_path):
    arguments = [text for text in small(tmp_path, "run", sums) if text != "trainer.device=cpu"]
    end = launch(slurm, [*arguments, "trainer.nproc=9"])
    assert end.code == EXIT_USER_ERROR
    says(end.output, "SLURM rejected the job", "trainer.device=cpu")
