"""Starts and ends a vLLM server process on this machine."""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from rlhf.config import RolloutConfig
from rlhf.ranks.parent import PARENT_PID
from rlhf.rollout.servers.secret import VARIABLE, Secret
from rlhf.rollout.servers.weights.plugin import SCRATCH_NAME
from rlhf.storage.scratch import Scratch

# Variables that torchrun and elastic set for a rank; vLLM would use them as its own.
_OF_THE_RANK = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_")
_KILL_TIMEOUT_S = 10.0

log = logging.getLogger(__name__)
# The kernel ends a server with the thread that started it (rlhf/ranks/parent.py); this thread lives as long as the
# process.
_starter = ThreadPoolExecutor(1, "server-starter")


class ServerProcess:
    """A vLLM server on this machine. Its weights are dummies until the first update."""

    def __init__(
        self,
        config: RolloutConfig,
        folder: Path,
        max_model_len: int,
        device: torch.device,
        gpus: Sequence[int | str],
        secret: Secret,
        log: Path,
    ) -> None:
        """
        Args:
            folder: Hugging Face configuration and tokenizer of the model.
            max_model_len: limit of prompt plus response in tokens.
            device: has the server's device type.
            gpus: visible CUDA devices, as in CUDA_VISIBLE_DEVICES; ignored on a CPU.
            log: file to which the server's output is appended.
        """
        self._flags = flags(config, folder, max_model_len, device)
        self._environment = environment(os.environ, device, gpus, secret)
        self._scratch: Scratch | None = None
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def start(self) -> None:
        """Start the server at a free port and return at once; it answers at `url` after about half a minute."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._scratch = Scratch()
        self._process = _starter.submit(self._start, port, self._scratch).result()

    def _start(self, port: int, scratch: Scratch) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "rlhf.rollout.servers", *self._flags, "--port", str(port)]
        with self._log.open("ab") as output:
            return subprocess.Popen(
                command,
                env=self._environment | scratch_environment(scratch),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def poll(self) -> int | None:
        """Return the server's exit code (negative for a signal); None while it runs or if it was never started."""
        return self._process.poll() if self._process else None

    def kill(self) -> None:
        """Kill all processes of the server, and wait until they and their files are gone. `start` may follow."""
        if self._process is not None:
            self._end(self._process)
        if self._scratch is not None:
            self._scratch.close()

    def _end(self, process: "subprocess.Popen[bytes]") -> None:
        group, deadline = process.pid, time.monotonic() + _KILL_TIMEOUT_S
        while running := processes_of(group):
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
            if time.monotonic() > deadline:
                log.warning("Processes %s of a rollout server don't end on SIGKILL (stuck in the kernel).", running)
                break
            time.sleep(0.02)
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.1)


def flags(config: RolloutConfig, folder: Path, max_model_len: int, device: torch.device) -> list[str]:
    """Return the command line of `python -m rlhf.rollout.servers`; engine_kwargs.vllm comes last and so wins."""
    ours: dict[str, Any] = {
        "dtype": config.dtype,
        "seed": 0,
        "load_format": "dummy",
        "max_model_len": max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "tensor_parallel_size": config.tensor_model_parallel_size,
    }
    if device.type == "cuda":
        ours |= {"gpu_memory_utilization": config.gpu_memory_utilization, "enforce_eager": config.enforce_eager}
    return [str(folder), *as_flags(ours | config.engine_kwargs.vllm)]


def as_flags(arguments: Mapping[str, Any]) -> list[str]:
    """Return vLLM's engine arguments as command-line flags; None leaves an argument to vLLM."""
    words = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, Mapping):
            words += [f"--{flag}", json.dumps(value)]
        elif isinstance(value, Sequence) and not isinstance(value, str):
            words += [f"--{flag}", *map(str, value)]
        elif value is not None:
            words += [f"--{flag}={value}"]
    return words


def environment(
    rank: Mapping[str, str], device: torch.device, gpus: Sequence[int | str], secret: Secret
) -> dict[str, str]:
    """Return a server's environment: the starting rank's without rank variables, and this process as the parent."""
    kept = {name: value for name, value in rank.items() if not name.startswith(_OF_THE_RANK)}
    kept[PARENT_PID] = str(os.getpid())
    kept[VARIABLE] = secret.value
    kept["OMP_NUM_THREADS"] = str(torch.get_num_threads())
    if device.type == "cuda":
        kept["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    return kept


def scratch_environment(scratch: Scratch) -> dict[str, str]:
    """Return variables that put a server's temporary files and sockets into `scratch`, and name its shared memory."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # seldom needed, and slow to import

    folder = str(scratch.folder)
    return {
        "TMPDIR": folder,
        "VLLM_RPC_BASE_PATH": folder,
        SCRATCH_NAME: scratch.name,
        # All servers share compiled code.
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir(),
    }


def processes_of(group: int) -> list[int]:
    """Return the running processes of a process group; zombies do not count."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(FileNotFoundError, ProcessLookupError):
            state, _, of_group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(of_group) == group and state not in "ZX":
                found.append(int(entry.name))
    return found
