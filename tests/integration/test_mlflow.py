"""MLflow's client against MLflow's own server: one run, every step once, also after kills and lost servers."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf.checkpoint.state.run_file import read_run_file
from rlhf.config import MlflowConfig, TrainerConfig
from rlhf.errors import EXIT_DONE
from rlhf.tracking import History
from rlhf.tracking.mlflow import mark_failed
from rlhf.tracking.mlflow_run import RUN_TAG, MlflowRun, metric_name
from tests.support.interrupter import at
from tests.support.launching import ranks, records, saved_steps, small
from tests.support.mlflow_server import PYTHON, free_port, mlflow_server, server_python
from tests.support.tracking_run import RUN_ID, metrics

pytest.importorskip("mlflow")
needs_server = pytest.mark.skipif(
    server_python() is None, reason=f"needs the whole of MLflow, whose Python ${PYTHON} names"
)
EXIT_KILLED = -signal.SIGKILL


def launch(run_dir: Path, url: str, *arguments: str, finish_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.support.tracking_run", str(run_dir), "mlflow", url, *arguments]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    return subprocess.run(
        command,
        env=kept | {"NO_PROXY": "*", "RLHF_TEST_FINISH_S": str(finish_s)},
        capture_output=True,
        text=True,
        timeout=300,
    )


class Server:
    """Reads a server with MLflow's client."""

    def __init__(self, url: str) -> None:
        from mlflow.tracking import MlflowClient

        self.url, self.client = url, MlflowClient(tracking_uri=url)

    def run(self, run_id: str):
        experiment = self.client.get_experiment_by_name("rlhf")
        (found,) = self.client.search_runs([experiment.experiment_id], f"tags.`{RUN_TAG}` = '{run_id}'")
        return found

    def curve(self, run_id: str, name: str) -> list[tuple[int, float]]:
        """Return steps and values in the order of their arrival."""
        history = self.client.get_metric_history(self.run(run_id).info.run_id, metric_name(name))
        return [(metric.step, metric.value) for metric in history]

    def table(self, run_id: str, step: int) -> str:
        path = self.client.download_artifacts(self.run(run_id).info.run_id, f"val/generations/step_{step}.html")
        return Path(path).read_text()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with mlflow_server(tmp_path_factory.mktemp("mlflow"), free_port()) as url:
        yield Server(url)


def expected(last: int, name: str) -> list[tuple[int, float]]:
    return [(step, metrics(step)[name]) for step in range(last + 1) if name in metrics(step)]


@pytest.mark.slow
@needs_server
def test_killed_runs_are_one_run_with_every_step_once(tmp_path: Path, server: Server) -> None:
    run_dir = tmp_path / "run"
    assert launch(run_dir, server.url, "none", "20", "12").returncode == EXIT_KILLED
    assert launch(run_dir, server.url, "10", "20", "14").returncode == EXIT_KILLED
    # This start ends normally at step 16, so the server is ahead of the next start.
    assert launch(run_dir, server.url, "10", "16").returncode == 0
    assert [step for step, _ in server.curve(RUN_ID, "reward/mean")] == list(range(17))
    assert launch(run_dir, server.url, "13", "20", "18").returncode == EXIT_KILLED
    end = launch(run_dir, server.url, "13", "20")
    assert (end.returncode, end.stdout, end.stderr) == (0, "", "")
    for name in metrics(0):
        assert server.curve(RUN_ID, name) == expected(20, name)
    for step in (0, 5, 10, 15, 20):
        assert f">says {step}</td>" in server.table(RUN_ID, step)
    run = server.run(RUN_ID)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "default")
    assert run.data.params["trainer.project_name"] == "rlhf"
    assert run.data.params["actor.optim.lr"] == "1e-06"


@pytest.mark.slow
@needs_server
def test_a_rollback_is_not_sent_twice(tmp_path: Path, server: Server) -> None:
    assert launch(tmp_path / "run", server.url, "none", "20", "12:10", "11:4", "15:13").returncode == 0
    assert server.curve(RUN_ID, "reward/mean") == expected(20, "reward/mean")


@pytest.mark.slow
@needs_server
def test_system_metrics_go_on_after_a_restart(server: Server) -> None:
    for first in (0, 2):
        run = MlflowRun(TrainerConfig(), MlflowConfig(tracking_uri=server.url), {}, "measured")
        run.connect()
        for _ in range(2):
            run.send_system_metrics()
        assert [step for step, _ in server.curve("measured", "system/system_memory_usage_percentage")] == [
            *range(first + 2)
        ]
        assert run.last_step < 0  # the server has system metrics, but no training step


@pytest.mark.slow
@needs_server
def test_a_server_that_comes_late_gets_all_steps(tmp_path: Path, server: Server) -> None:
    run_dir, port = tmp_path / "run", free_port()
    lost = launch(run_dir, f"http://127.0.0.1:{port}", "none", "30")
    assert lost.returncode == 0
    with mlflow_server(tmp_path / "late", port) as url:
        assert launch(run_dir, url, "30", "30").returncode == 0
        assert Server(url).curve(RUN_ID, "reward/mean") == expected(30, "reward/mean")
        assert Server(url).run(RUN_ID).info.status == "FINISHED"


@pytest.mark.slow
@needs_server
def test_a_training_killed_between_log_and_save(tmp_path: Path, sums: Path, server: Server) -> None:
    uri = server.url.replace("://", "://me:typed-by-hand@")
    own = [f"tracking.mlflow.tracking_uri={uri}", "trainer.logger=[mlflow]", "checkpoint.async_save=false"]
    command = small(tmp_path, "tracked", sums, *own)
    run_dir = tmp_path / "rlhf" / "tracked"
    # The kill loses steps 4 and 5, which were logged, since the last checkpoint is of step 3.
    killed = ranks(tmp_path / "log", command, at("update.before", 6, "SIGKILL"))
    assert killed.code == -9, killed.output
    assert saved_steps(run_dir) == [3]
    run_id = read_run_file(run_dir)["run_id"]
    assert server.run(run_id).info.status == "RUNNING"
    mark_failed(TrainerConfig(), MlflowConfig(tracking_uri=server.url), run_id)  # like a supervisor that gives up
    assert server.run(run_id).info.status == "FAILED"
    end = ranks(tmp_path / "log", command)
    assert end.code == EXIT_DONE, end.output
    assert "mlflow" not in end.output
    for name in ("reward/mean", "actor/grad_norm", "response_length/mean"):
        assert server.curve(run_id, name) == [(record["step"], record[name]) for record in records(run_dir)]
    run = server.run(run_id)
    assert run.info.status == "FINISHED"
    files = server.client.download_artifacts(run.info.run_id, "settings.json")
    settings = json.loads(Path(files).read_text())
    assert settings["trainer"]["logger"] == ["mlflow"]
    assert "typed-by-hand" not in str(settings) + str(run.data.params) + end.output


@pytest.mark.parametrize("trouble", ["gone", "silent"])
def test_a_lost_server_delays_nothing_and_is_one_warning(tmp_path: Path, trouble: str) -> None:
    run_dir = tmp_path / "run"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        if trouble == "gone":
            listener.close()
        began = time.monotonic()
        end = launch(run_dir, f"http://127.0.0.1:{port}", "none", "50", finish_s=2.0)
    assert end.returncode == 0
    assert time.monotonic() - began < 60
    assert [record["step"] for record in History(run_dir / "metrics.jsonl").records()] == list(range(51))
    lines = end.stderr.splitlines()
    assert [line for line in lines if "lacks all steps" in line]
    assert len(lines) <= 2, lines
