"""Starts MLflow's own server on SQLite, in an environment that has the whole of MLflow."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PYTHON = "RLHF_MLFLOW_PYTHON"
"""Environment variable with the path of a Python that has `mlflow`; the client needs only `mlflow-skinny`."""
DEADLINE_S = 240


def server_python() -> str | None:
    """Return the Python for the server; None if no environment with the whole of MLflow is known."""
    try:
        version("mlflow")
    except PackageNotFoundError:
        return os.environ.get(PYTHON)
    return os.environ.get(PYTHON, sys.executable)


def free_port() -> int:
    """Return a port of this machine that nothing uses now."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@contextmanager
def mlflow_server(folder: Path, port: int) -> Iterator[str]:
    """Serve until the block ends. Yield the address, once the server answers."""
    folder.mkdir(parents=True, exist_ok=True)
    python, log = server_python(), folder / "server.log"
    assert python is not None
    command = [python, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder}/runs.db", "--artifacts-destination", str(folder / "files")]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    variables = kept | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    with log.open("ab") as output:
        server = subprocess.Popen(
            command, cwd=folder, env=variables, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        url, end = f"http://127.0.0.1:{port}", time.monotonic() + DEADLINE_S
        while not _answers(url):
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.2)
        yield url
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
