"""Describes a vLLM server process on this machine: its command line, its environment, and when it may be reused."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash

from rlhf.config import RolloutConfig
from rlhf.ranks.loaded_sources import code_on_disk
from rlhf.rollout.servers.keeper import Keeper, RemoteKeeper
from rlhf.rollout.servers.secret import VARIABLE, Secret

# Variables that torchrun and elastic set for a rank; vLLM would use them as its own.
_OF_THE_RANK = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_")
_OF_THE_SERVER = (VARIABLE, "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "VLLM_", "TORCH")


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
        keeper: Keeper | RemoteKeeper,
    ) -> None:
        """
        Args:
            folder: Hugging Face configuration and tokenizer of the model.
            max_model_len: limit of prompt plus response in tokens.
            device: the server runs on this type of device.
            gpus: visible CUDA devices, as in CUDA_VISIBLE_DEVICES; ignored on a CPU.
            log: file to which the server's output is appended.
            keeper: starts and ends the server.
        """
        self._command = ["-m", "rlhf.rollout.servers", *flags(config, folder, max_model_len, device)]
        self._environment = environment(os.environ, device, gpus, secret)
        self._log, self._keeper = str(log), keeper
        self.url = ""

    def adopt(self) -> bool:
        """Reuse the server of an earlier attempt if it runs with the same fingerprint. Return whether it does."""
        url = self._keeper.find(self._log, self._fingerprint())
        self.url = url or self.url
        return url is not None

    def start(self) -> None:
        """Start the server at a free port and return at once; it answers at `url` after about half a minute."""
        fingerprint = self._fingerprint()
        self.url = self._keeper.start(self._log, self._command, self._environment, self._log, fingerprint)

    def poll(self) -> int | None:
        """Return the server's exit code (negative for a signal); None while it runs or if it was never started."""
        return self._keeper.poll(self._log)

    def kill(self) -> None:
        """Kill all processes of the server, and wait until they and their files are gone. `start` may follow."""
        self._keeper.kill(self._log)

    def _fingerprint(self) -> str:
        """Return a hash of the command, of the variables that affect the server, and of the code on disk."""
        variables = {name: value for name, value in self._environment.items() if name.startswith(_OF_THE_SERVER)}
        start = json.dumps([self._command, variables, code_on_disk()], sort_keys=True)
        return xxhash.xxh3_128_hexdigest(start.encode())


def flags(config: RolloutConfig, folder: Path, max_model_len: int, device: torch.device) -> list[str]:
    """Return the command line of `python -m rlhf.rollout.servers`; values in engine_kwargs.vllm override ours."""
    ours: dict[str, Any] = {
        "dtype": config.dtype,
        "seed": 0,
        "load_format": "dummy",
        "max_model_len": max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "tensor_parallel_size": config.tensor_model_parallel_size,
        "return_sampling_mask": config.sampling_mask or None,
    }
    if device.type == "cuda":
        ours |= {"gpu_memory_utilization": config.gpu_memory_utilization, "enforce_eager": config.enforce_eager}
    return [str(folder), *as_flags(ours | config.engine_kwargs.vllm)]


def as_flags(arguments: Mapping[str, Any]) -> list[str]:
    """Return vLLM's engine arguments as command-line flags. An argument with the value None gets vLLM's default."""
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
    """Return a server's environment: this rank's variables without torchrun's, plus secret and GPUs."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # this import is slow and seldom needed

    kept = {name: value for name, value in rank.items() if not name.startswith(_OF_THE_RANK)}
    kept[VARIABLE] = secret.value
    # All servers share compiled code.
    kept.setdefault("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())
    kept["OMP_NUM_THREADS"] = str(torch.get_num_threads())
    if device.type == "cuda":
        kept["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    return kept
