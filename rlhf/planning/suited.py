"""Defaults that suit the device: the values of settings that are null. Imports neither torch nor vLLM."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlhf.config.known_settings import SETTINGS
from rlhf.config.vllm_versions import installation_problem
from rlhf.planning.devices import count_gpus

ON_CUDA = {"backend.autocast": "bfloat16", "rollout.dtype": "bfloat16", "trainer.tf32": True}


@dataclass(frozen=True)
class Machine:
    """Machine of a run, as far as settings depend on it."""

    gpus: int
    vllm_problem: str | None
    """The reason why vLLM cannot be used in this installation; None if it can."""

    @classmethod
    def here(cls) -> "Machine":
        """This one, by its driver and what is installed."""
        gpus = count_gpus()
        return cls(gpus, installation_problem() if gpus else None)

    def is_cuda(self, device: str) -> bool:
        """Whether a run with this `trainer.device` is on GPUs."""
        return device == "cuda" or (device == "auto" and self.gpus > 0)


def suited(setting: Callable[[str], Any], machine: Machine, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Values for the settings that are null and stand for what suits the device, by their dotted names.

    Args:
        setting: the value of a dotted setting; None for one that is missing.
    """
    cuda = machine.is_cuda(setting("trainer.device"))
    found = {key: leaf.default for key, leaf in SETTINGS.items() if leaf.metadata["by_device"]}
    if cuda:
        found |= ON_CUDA
        trusts = setting("model.trust_remote_code")  # which vLLM is not given
        found["rollout.name"] = "embedded" if machine.vllm_problem or not machine.gpus or trusts else "vllm"
    if "RANK" in environ and "WORLD_SIZE" in environ:
        found["trainer.nproc"] = int(environ.get("LOCAL_WORLD_SIZE", environ["WORLD_SIZE"]))
    elif cuda:
        found["trainer.nproc"] = max(1, machine.gpus - _of_servers(setting))
    return {key: value for key, value in found.items() if setting(key) is None}


def _of_servers(setting: Callable[[str], Any]) -> int:
    """GPUs that servers which the run starts have for themselves."""
    if setting("rollout.name") != "vllm_server" or setting("rollout.servers.urls"):
        return 0
    return int(setting("rollout.servers.count") * setting("rollout.tensor_model_parallel_size"))
