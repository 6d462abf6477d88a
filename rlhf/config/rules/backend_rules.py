"""Checks the backend's settings, also against the device, and its packages."""

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from packaging.version import Version

from rlhf.config import Config
from rlhf.config.rules.without_effect import without_effect


def backend_problems(config: Config) -> Iterator[str]:
    backend = config.backend
    if backend.use_liger and config.actor.needs_entropy:
        yield (
            "backend.use_liger=true: Liger's kernel cannot compute the entropy; set actor.calculate_entropy=false, "
            "actor.entropy_coeff=0 and actor.entropy_ctrl.type=fixed."
        )
    if backend.use_liger and config.rollout.sampling_mask:
        yield (
            "backend.use_liger=true: Liger's kernel normalizes over the whole vocabulary; set backend.use_liger=false, "
            "or rollout.sampling_mask=false."
        )
    if config.trainer.tf32 and config.trainer.device == "cpu":
        yield "trainer.tf32=true: only GPUs have TF32, but trainer.device=cpu; set trainer.tf32=false."
    if backend.use_liger and config.trainer.device == "cpu":
        yield "backend.use_liger=true: Liger needs a GPU, but trainer.device=cpu; set backend.use_liger=false."
    if backend.name != "deepspeed":
        yield from without_effect(config, ["backend.zero_stage"], "backend=deepspeed", backend.name)
        for line in without_effect(config, ["backend.offload_optimizer"], "backend=deepspeed", backend.name):
            yield f"{line} FSDP2's setting is actor.fsdp_config.optimizer_offload=true."
        return
    yield from without_effect(config, ["backend.dp_replicate"], "backend=fsdp2", backend.name)
    if backend.offload_optimizer and backend.zero_stage == 0:
        yield "backend.offload_optimizer=true: needs ZeRO; set backend.zero_stage=1, 2 or 3."
    for role, section in (("actor", config.actor), ("critic", config.critic)):
        if backend.offload_optimizer and section.fsdp_config.optimizer_offload:
            yield (
                f"{role}.fsdp_config.optimizer_offload=true: backend.offload_optimizer=true always keeps the optimizer "
                "in host memory; set one of the two to false."
            )
    if backend.offload_optimizer and config.trainer.device == "cpu":
        yield (
            "backend.offload_optimizer=true: moves optimizer state from a GPU to the CPU, but trainer.device=cpu; "
            "set backend.offload_optimizer=false."
        )


def package_problem(package: str, least: str) -> str | None:
    """Return the problem if `package` is missing or older than the version `least`, else None."""
    try:
        found = version(package)
    except PackageNotFoundError:
        return f"{package} is not installed"
    return None if Version(found) >= Version(least) else f"{package} {found} is installed, {least} is needed"


def missing_backend(config: Config) -> Iterator[str]:
    if config.backend.use_liger and (problem := package_problem("liger-kernel", "0.8.5")):
        yield f"backend.use_liger=true: {problem}; run `pip install 'rlhf[liger]'`, or set backend.use_liger=false."
    spec = find_spec("deepspeed")
    if config.backend.name == "deepspeed" and (spec is None or spec.origin is None):
        yield (
            "backend.name=deepspeed: DeepSpeed is not installed; run `pip install 'rlhf[deepspeed]'`, or set "
            "backend=fsdp2."
        )
