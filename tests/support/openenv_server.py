"""Serves the environment that `openenv init` writes: it answers with the policy's text."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.mlflow_server import free_port

DEADLINE_S = 60
# The written server allows one session.
SERVE = """
import sys
import uvicorn
from openenv.core.env_server.http_server import create_app
from echoer.models import EchoerAction, EchoerObservation
from echoer.server.echoer_environment import EchoerEnvironment
app = create_app(EchoerEnvironment, EchoerAction, EchoerObservation, max_concurrent_envs=int(sys.argv[2]))
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
"""


@contextmanager
def openenv_server(folder: Path, sessions: int = 64) -> Iterator[str]:
    """Serve until the block ends. Yield the address, once the server answers."""
    command = [str(Path(sys.executable).with_name("openenv")), "init", "echoer"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=DEADLINE_S)
    port, log = free_port(), folder / "server.log"
    with log.open("ab") as output:
        server = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(port), str(sessions)],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(folder)},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
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
