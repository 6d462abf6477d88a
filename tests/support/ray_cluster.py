"""Runs a Ray cluster for tests: two nodes with one CPU each on this machine, started in a Python that has Ray."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.launching import ROOT, Ended

PYTHON = "RLHF_RAY_PYTHON"
"""Environment variable with the path of a Python that has Ray and this project's packages."""
OPTIONS = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 120 << 20}
OCCUPY = "occupy"
DEADLINE_S = 420
"""Seconds for a run or the start of the cluster: on a busy machine, Ray's own processes start slowly."""


def ray_python() -> str | None:
    """Return the Python for Ray; None if no environment with Ray is known."""
    return os.environ.get(PYTHON) or (sys.executable if importlib.util.find_spec("ray") else None)


needs_ray = pytest.mark.skipif(ray_python() is None, reason=f"Ray is not installed, and ${PYTHON} is not set")


class Cluster:
    """A running cluster of two nodes, controlled by lines on the stdin of its process."""

    def __init__(self, process: "subprocess.Popen[str]", folder: Path) -> None:
        self._process, self._answers = process, folder / "answers"
        self.address = self._answer(1)

    def do(self, command: str) -> None:
        """Run `lose`, `add` or `preempt` on the second node, and wait until the cluster has done it."""
        assert self._process.stdin is not None
        count = len(self._answers.read_text().splitlines())
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        self._answer(count + 1)

    def _answer(self, number: int) -> str:
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end:
            lines = self._answers.read_text().splitlines() if self._answers.exists() else []
            if len(lines) >= number:
                return lines[number - 1]
            assert self._process.poll() is None, "the cluster has ended"
            time.sleep(0.1)
        raise AssertionError("Ray does not answer")

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> "subprocess.Popen[bytes]":
        """Start `python -m rlhf.train launcher=ray ARGUMENTS` in the repository; the output goes to `log`."""
        command = [str(ray_python()), "-m", "rlhf.train", "launcher=ray", *arguments]
        variables = {**os.environ, "RAY_ADDRESS": self.address, "PYTHONPATH": str(ROOT), **environment}
        with log.open("w") as output:
            return subprocess.Popen(
                command, cwd=ROOT, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    def train(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Ended:
        """Run the command of `start` to its end. pytest shows the output of a test that fails."""
        process = self.start(arguments, environment, log)
        try:
            code = process.wait(DEADLINE_S)
        finally:
            process.kill()
            lines = self.output(log)
            sys.stdout.writelines(lines)
        return Ended(code, "".join(lines))

    def output(self, log: Path) -> list[str]:
        """Return the lines of a log, but not the line that Ray repeats each second without a dashboard."""
        return [line for line in log.read_text().splitlines(True) if "PlacementGroupCleaner" not in line]


@contextmanager
def ray_cluster(folder: Path) -> Iterator[Cluster]:
    """Start the cluster with its messages in `folder`, and stop it in the end."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [str(ray_python()), "-m", __name__, str(folder / "answers")]
    variables = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    variables |= {"PYTHONPATH": str(ROOT), "RAY_DISABLE_DOCKER_CPU_WARNING": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=variables,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            text=True,
            start_new_session=True,
        )
    try:
        yield Cluster(process, folder)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextmanager
def occupied(cluster: Cluster) -> Iterator[None]:
    """Let another program use the CPU of one node."""
    command = [str(ray_python()), "-m", __name__, OCCUPY, cluster.address]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command, cwd=ROOT, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert any(line.strip() == OCCUPY for line in process.stdout), "the program has ended"
        yield
    finally:
        process.stdin.close()
        process.wait(60)


def _occupy(address: str) -> None:
    import ray
    from ray.util import placement_group

    ray.init(address)
    assert placement_group([{"CPU": 1}]).wait(60)
    sys.stdout.write(f"{OCCUPY}\n")
    sys.stdout.flush()
    sys.stdin.read()


def _started() -> tuple[Any, Any]:
    """Return the nodes and the second of them. Try again if Ray's own 30 s for a node's start were too short."""
    from ray.cluster_utils import Cluster as Nodes

    for last in (False, False, True):
        nodes = Nodes()
        try:
            nodes.add_node(**OPTIONS)
            second = nodes.add_node(**OPTIONS)
            nodes.wait_for_nodes()
            return nodes, second
        except Exception:
            nodes.shutdown()
            if last:
                raise
    raise AssertionError


def _serve(answers: Path) -> None:
    """Start the nodes, then obey stdin until it is closed."""
    nodes, second = _started()
    _tell(answers, nodes.address)
    for line in sys.stdin:
        match line.strip():
            case "lose":
                nodes.remove_node(second, allow_graceful=False)
            case "add":
                second = nodes.add_node(**OPTIONS)
                nodes.wait_for_nodes()
            case "preempt":
                _drain(nodes.address, second.node_id)
        _tell(answers, line.strip())
    nodes.shutdown()


def _drain(address: str, node: str) -> None:
    command = [str(Path(sys.executable).with_name("ray")), "drain-node", f"--address={address}", f"--node-id={node}"]
    command += ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=test", "--deadline-remaining-seconds=600"]
    subprocess.run(command, check=True)


def _tell(answers: Path, text: str) -> None:
    with answers.open("a") as file:
        file.write(f"{text}\n")


if __name__ == "__main__":
    if sys.argv[1] == OCCUPY:
        _occupy(sys.argv[2])
    else:
        _serve(Path(sys.argv[1]))
