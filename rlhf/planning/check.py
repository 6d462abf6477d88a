"""Checks a run's plan against the memory of its device, before the run starts."""

import logging
import os
import shlex

from rlhf.config import Config
from rlhf.config.derived import needs_critic, needs_reward_model
from rlhf.config.rules.validate import number_of_ranks
from rlhf.errors import UserError
from rlhf.planning.combination import combination
from rlhf.planning.devices import count_gpus, gpu_memory, machine_memory
from rlhf.planning.memory_plan import Models, Plan, Target, evaluation_share, memory_plan
from rlhf.planning.model_shapes import ModelShapes, shapes_from_files
from rlhf.planning.plan_text import cache_problem, devices_needed, gib, host_problem, nothing_fits, plan_peak
from rlhf.ranks.memory_folder import SNAPSHOTS, check_room, copies_text, less_memory

log = logging.getLogger(__name__)


def target_of(config: Config, device_memory: int | None = None, ranks: int | None = None) -> Target:
    """Return the devices of a run.

    Args:
        device_memory: bytes for each rank on another machine (with CUDA, of its GPU); None for this machine's devices.
        ranks: ranks on all machines; None for the ranks that this command starts, or that torchrun has started.
    """
    here, _ = number_of_ranks(config)
    ranks, local = ranks or here, int(os.environ.get("LOCAL_WORLD_SIZE", config.trainer.ranks))
    device = config.trainer.device
    if device == "cuda" or (device == "auto" and (device_memory is not None or count_gpus() > 0)):
        if device_memory is not None:
            return Target(True, ranks, device_memory)
        return Target(True, ranks, gpu_memory(), machine_memory() // local)
    # The ranks of a machine share its memory.
    return Target(False, ranks, device_memory if device_memory is not None else machine_memory() // local)


def models_of(config: Config, *, from_config: bool) -> Models | None:
    """Return the models of a run with these settings.

    Args:
        from_config: if a model's files do not determine its shapes, build it on the meta device, which imports torch.
            Otherwise return None if there is such a model.

    Raises:
        UserError: with `from_config`, a model does not exist, or transformers does not support its config.json.
    """

    def shapes_of(setting: str, path: str, revision: str | None, *, classifier: bool = False) -> ModelShapes | None:
        found = shapes_from_files(path, revision)
        if found is None and from_config:
            from rlhf.planning.meta_shapes import shapes_from_config

            found = shapes_from_config(setting, path, revision, classifier=classifier)
        return found

    with_critic = needs_critic(config.algorithm, config.critic)
    policy = shapes_of("model.path", config.model.path, config.model.revision)
    critic = reward_model = None
    if with_critic:
        own = config.critic.path
        start = policy if own is None else shapes_of("critic.path", own, None)
        critic = None if start is None else start.with_value_head()
    path = config.reward_model.path if needs_reward_model(config.reward) else None
    if path is not None:
        reward_model = shapes_of("reward_model.path", path, config.reward_model.revision, classifier=True)
    if policy is None or (with_critic and critic is None) or (path is not None and reward_model is None):
        return None
    return Models(policy, critic, reward_model)


def plan_of(config: Config) -> tuple[Models, Plan] | None:
    """Return the models and the plan of a run on this machine; None if headers of model files are not enough.

    Imports no torch.
    """
    models = models_of(config, from_config=False)
    return None if models is None else (models, memory_plan(config, models, target_of(config)))


def check_heads(config: Config, policy: ModelShapes) -> None:
    """Raise UserError if vLLM cannot split the attention heads of the policy over the GPUs of an engine."""
    rollout, heads, key_heads = config.rollout, policy.heads, policy.key_heads
    if rollout.name == "embedded" or rollout.servers.urls:
        return

    def splits(gpus: int) -> bool:
        return heads % gpus == 0 and (key_heads % gpus == 0 or gpus % key_heads == 0)

    if not splits(rollout.tensor_model_parallel_size):
        right = ", ".join(str(gpus) for gpus in range(1, heads + 1) if splits(gpus))
        raise UserError(
            f"rollout.tensor_model_parallel_size={rollout.tensor_model_parallel_size}: vLLM cannot split {heads} "
            f"attention heads with {key_heads} key-value heads ({config.model.path}) evenly. Set it to one of {right}."
        )


def check_engine(config: Config) -> None:
    """Raise UserError if vLLM cannot split the policy over the GPUs of an engine, as far as the model's files show."""
    policy = shapes_from_files(config.model.path, config.model.revision)
    if policy is not None:
        check_heads(config, policy)


def engine_share(config: Config, *, trains: bool) -> float:
    """Return the fraction of a GPU's memory for vLLM in the ranks.

    This is `rollout.gpu_memory_utilization`, or else the fraction that training (`trains`) or an evaluation leaves. If
    the memory plan is unknown, this is a default.
    """
    models = models_of(config, from_config=False)
    if models is None:
        return config.rollout.vllm_share
    target = target_of(config)
    share = memory_plan(config, models, target).engine_share if trains else evaluation_share(config, models, target)
    return share or config.rollout.vllm_share


def check_snapshots(config: Config, plan: Plan) -> None:
    """Raise UserError if this machine's tmpfs or its whole memory has no room for the snapshots of its ranks."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", config.trainer.ranks))
    memory, size = config.checkpoint.memory, plan.checkpoint
    if not size.snapshot:
        return
    check_room(memory.dir, config.run_dir, ranks * size.published, memory.replicas)
    needed, there = ranks * (size.published + size.snapshot), machine_memory()
    if needed > there:
        raise UserError(
            f"checkpoint.memory.freq={memory.freq}: {SNAPSHOTS} snapshots, the snapshot being written"
            f"{copies_text(memory.replicas)} and the copy of the state from which it is written need {gib(needed)} on "
            f"this machine, which has {gib(there)}. Set {less_memory(memory.replicas)}."
        )


def check_fits(config: Config) -> None:
    """Raise UserError with the peak and remedies if the plan exceeds a rank's part of GPU or host memory.

    Without GPUs, only log a warning. With GPUs and `trainer.check_memory=false`, ignore the plan's memory. In all cases
    raise UserError if vLLM can't split the attention heads, or if snapshots do not fit.
    """
    found = plan_of(config)
    if found is None:
        return
    models, plan = found
    check_heads(config, models.policy)
    check_snapshots(config, plan)
    if plan.fits or plan.target.memory is None:
        return
    peak, memory = plan.peak, plan.target.memory
    assert memory is not None
    largest = sorted(peak.items.items(), key=lambda item: -item[1])[:3]
    problem = (
        f"{peak.name} needs {gib(peak.total)} on each rank, and a rank has {gib(memory)} (largest parts: "
        f"{', '.join(f'{name} {gib(size)}' for name, size in largest)})."
    )
    if memory >= peak.total:
        problem = (
            host_problem(plan)
            if plan.engine_starts
            else f"the engine would not start: {cache_problem(config.rollout, plan)}"
        )
    if not plan.target.cuda:
        if os.environ.get("RANK", "0") != "0":
            return
        log.warning("The memory may be too small for the run: %s%s", problem, _remedy(config, models, plan))
    elif config.trainer.check_memory:
        raise UserError(
            f"The run does not fit: {problem}{_remedy(config, models, plan)} `python -m rlhf.plan` with the same "
            "settings shows the whole plan. To start anyway, set trainer.check_memory=false."
        )


def _remedy(config: Config, models: Models, plan: Plan) -> str:
    """Return the changes that together make the run fit, or the devices that the run needs."""
    together = combination(config, models, plan)
    if together.plan.fits:
        return (
            f" Together these settings make the run fit ({plan_peak(together.plan)}); add them to the command: "
            f"{shlex.join(together.overrides)}."
        )
    return f" {nothing_fits(together)} {devices_needed(together)}"
