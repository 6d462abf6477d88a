"""Runs other trainers' code in the environment that has them."""

import os
import subprocess
from pathlib import Path

PEERS_PYTHON = "RLHF_PEERS_PYTHON"
"""Environment variable with the path of that environment's Python."""
DEADLINE_S = 400


def run_in_peers(script: Path, *arguments: object) -> str:
    """Run a script that imports nothing from this project, and return its output, or fail with its output."""
    command = [os.environ[PEERS_PYTHON], str(script), *map(str, arguments)]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = kept | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, f"{command}:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done.stdout
