"""Chooses device defaults: values for null settings that fit the devices. Imports neither torch nor vLLM."""

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
    """Facts about the machine that settings depend on."""

    gpus: int
    vllm_problem: str | None
    """Why this installation cannot use vLLM; None if it can, or if the machine has no GPU."""

    @classmethod
    def here(cls) -> "Machine":
        gpus = count_gpus()
        return cls(gpus, installation_problem() if gpus else None)

    def is_cuda(self, device: str) -> bool:
        """Return whether a run with this `trainer.device` uses GPUs."""
        return device == "cuda" or (device == "auto" and self.gpus > 0)


def device_defaults(
    setting: Callable[[str], Any], machine: Machine, environ: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """Return the device's values for settings that are null, by dotted name.

    Args:
        setting: returns the value of a dotted setting; None for a missing setting.
    """
    cuda = machine.is_cuda(setting("trainer.device"))
    found = {key: leaf.default for key, leaf in SETTINGS.items() if leaf.metadata["by_device"]}
    if cuda:
        found |= ON_CUDA
        trusts = setting("model.trust_remote_code")  # the trainer does not pass the model's code to vLLM
        found["rollout.name"] = "embedded" if machine.vllm_problem or not machine.gpus or trusts else "vllm"
    if "RANK" in environ and "WORLD_SIZE" in environ:
        found["trainer.nproc"] = int(environ.get("LOCAL_WORLD_SIZE", environ["WORLD_SIZE"]))
    elif cuda:
        found["trainer.nproc"] = max(1, machine.gpus - server_gpus(setting))
    return {key: value for key, value in found.items() if setting(key) is None}


def server_gpus(setting: Callable[[str], Any]) -> int:
    """Return the number of GPUs used by servers that the run starts."""
    if setting("rollout.name") != "vllm_server" or setting("rollout.servers.urls"):
        return 0
    return int(setting("rollout.servers.count") * setting("rollout.tensor_model_parallel_size"))
