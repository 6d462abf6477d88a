"""Two pods of a JobSet, as processes with the arguments and variables of the manifest: stop signals and mistakes."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rlhf.errors import EXIT_DONE, EXIT_REQUEUE, EXIT_USER_ERROR
from tests.support.compare_runs import differences
from tests.support.hanger import hangs, wait_for
from tests.support.launching import DEADLINE_S, ROOT, saved_steps, small, train
from tests.support.undisturbed import EXPORT

pytestmark = pytest.mark.slow
# The undisturbed run is on one machine with whole replicas. `dp_replicate=2` gives two pods whole replicas, too.
TWO_PODS = ("trainer.nproc=1", "trainer.nnodes=2", "backend.dp_replicate=2")


class Pods:
    """Starts the pods of a manifest in `volume`, in place of /work."""

    def __init__(self, volume: Path, sums: Path) -> None:
        arguments = [*small(Path("runs"), "run", sums), EXPORT, *TWO_PODS]
        end = train(["--image=x", "--claim=x", *arguments], module="rlhf.launch.kubernetes")
        assert end.code == EXIT_DONE, end.output
        job = yaml.safe_load(end.output)["spec"]["replicatedJobs"][0]["template"]["spec"]
        (self._container,) = job["template"]["spec"]["containers"]
        self._volume, self._number = volume, job["completions"]
        self.run_dir = volume / "runs" / "rlhf" / "run"

    def start(self, variables: dict[str, str] | None = None) -> list[subprocess.Popen[bytes]]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        declared = {each["name"]: each.get("value", "uid") for each in self._container["env"]}
        here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": str(ROOT)}
        *_, dash_m, module = self._container["command"]
        command = [sys.executable, dash_m, module, *self._container["args"]]
        return [
            subprocess.Popen(
                command,
                cwd=self._volume,
                env=os.environ | declared | here | (variables or {}) | {"JOB_COMPLETION_INDEX": str(index)},
            )
            for index in range(self._number)
        ]

    @staticmethod
    def ends(pods: list[subprocess.Popen[bytes]]) -> list[int]:
        return [pod.wait(DEADLINE_S) for pod in pods]


@pytest.fixture
def pods(tmp_path, sums) -> Pods:
    return Pods(tmp_path, sums)


def test_a_stopped_pod_saves_and_both_continue(pods, tmp_path, undisturbed):
    running = pods.start(hangs(tmp_path, ("update.before", 2, 0, "pause")))
    wait_for(tmp_path / "hung_0")
    running[1].send_signal(signal.SIGTERM)  # one node is drained
    assert pods.ends(running) == [EXIT_REQUEUE, EXIT_REQUEUE]
    assert saved_steps(pods.run_dir) == [2]
    assert pods.ends(pods.start()) == [EXIT_DONE, EXIT_DONE]
    assert differences(undisturbed.run_dir(2), pods.run_dir) == []


def test_a_mistake_that_only_pods_find_is_exit_code_2(pods, tmp_path):
    (tmp_path / "runs").touch()  # in the way of the run directory
    assert pods.ends(pods.start()) == [EXIT_USER_ERROR, EXIT_USER_ERROR]
