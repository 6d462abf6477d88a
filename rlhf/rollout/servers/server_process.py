"""Process of a vLLM server, started by this rank."""

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

# What torchrun and elastic tell a rank; vLLM would take them for its own.
_OF_THE_RANK = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_")
_KILL_PATIENCE_S = 10.0

log = logging.getLogger(__name__)
# The kernel ends a server with the thread that started it (rlhf/ranks/parent.py); this one lives as long as the
# process.
_starter = ThreadPoolExecutor(1, "server-starter")


class ServerProcess:
    """One server of this machine, started with the weights of nobody: dummies until the first update."""

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
            folder: configuration and tokenizer of the model, as Hugging Face has them.
            max_model_len: tokens of the longest prompt with its response.
            device: of whose type the server's devices are.
            gpus: the CUDA devices that it may see, as CUDA_VISIBLE_DEVICES names them; without meaning on a CPU.
            secret: what it asks for on every route.
            log: what it says is appended here.
        """
        self._flags = flags(config, folder, max_model_len, device)
        self._environment = environment(os.environ, device, gpus, secret)
        self._scratch: Scratch | None = None
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def start(self) -> None:
        """Start it at a port that is free now, and return at once; it will answer at `url`, in half a minute or so."""
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
                env=self._environment | own_places(scratch),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def poll(self) -> int | None:
        """The exit code of the server, negative for a signal; None while it runs or if it was never started."""
        return self._process.poll() if self._process else None

    def kill(self) -> None:
        """SIGKILL to all of its processes; returns once they and what they leave are gone. It can be started again."""
        if self._process is not None:
            self._end(self._process)
        if self._scratch is not None:
            self._scratch.close()

    def _end(self, process: "subprocess.Popen[bytes]") -> None:
        group, deadline = process.pid, time.monotonic() + _KILL_PATIENCE_S
        while running := processes_of(group):
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
            if time.monotonic() > deadline:
                log.warning("Processes %s of a rollout server don't end with SIGKILL: the kernel holds them.", running)
                break
            time.sleep(0.02)
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.1)


def flags(config: RolloutConfig, folder: Path, max_model_len: int, device: torch.device) -> list[str]:
    """The command line of `python -m rlhf.rollout.servers`; vLLM's own arguments come last and so win."""
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
    """vLLM's engine arguments as its command line has them; one that is None is left to vLLM."""
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
    """A server's environment, from that of the rank which starts it: it is no rank, and ends with this process."""
    kept = {name: value for name, value in rank.items() if not name.startswith(_OF_THE_RANK)}
    kept[PARENT_PID] = str(os.getpid())
    kept[VARIABLE] = secret.value
    kept["OMP_NUM_THREADS"] = str(torch.get_num_threads())
    if device.type == "cuda":
        kept["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    return kept


def own_places(scratch: Scratch) -> dict[str, str]:
    """Environment in which a server's temporary files and sockets are in `scratch`, and shared memory has its name."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # seldom needed, and slow to import

    folder = str(scratch.folder)
    return {
        "TMPDIR": folder,
        "VLLM_RPC_BASE_PATH": folder,
        SCRATCH_NAME: scratch.name,
        # What was compiled once is for all servers.
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir(),
    }


def processes_of(group: int) -> list[int]:
    """The processes of a process group that run; a zombie that its adoptive parent has yet to collect doesn't."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(FileNotFoundError, ProcessLookupError):
            state, _, of_group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(of_group) == group and state not in "ZX":
                found.append(int(entry.name))
    return found
