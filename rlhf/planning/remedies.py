"""Settings that lower the peak of a plan, each with the bytes that it would save: the plan is made again with each."""

import math
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from rlhf.config import Config
from rlhf.config.rules.validate import validate
from rlhf.errors import UserError
from rlhf.planning.memory_plan import Models, Plan, memory_plan
from rlhf.planning.pass_sizes import longest_sample


@dataclass(frozen=True)
class Remedy:
    """A change of one setting."""

    setting: str
    value: Any
    saved: int
    """Bytes by which the peak of a rank's device falls."""
    fits: bool
    """Whether the run fits with this change alone."""

    def __str__(self) -> str:
        value = str(self.value)
        # An engine is a group's entry.
        setting = "rollout" if self.setting == "rollout.name" else self.setting
        return f"{setting}={value.lower() if isinstance(self.value, bool) else value}"


def remedies(config: Config, models: Models, plan: Plan) -> list[Remedy]:
    """Changes that lower the peak by at least a hundredth, the one that saves most first."""
    found = []
    for setting, value in _candidates(config, plan):
        changed = deepcopy(config)
        *sections, name = setting.split(".")
        section: Any = changed
        for part in sections:
            section = getattr(section, part)
        setattr(section, name, value)
        target = plan.target if setting != "trainer.nproc" else replace(plan.target, ranks=value)
        try:
            validate(changed, {"RANK": "0", "WORLD_SIZE": str(target.ranks)}, here=False)
        except UserError:
            continue
        other = memory_plan(changed, models, target)
        saved = plan.peak.total - other.peak.total
        if saved * 100 >= plan.peak.total and other.engine_starts >= plan.engine_starts:
            found.append(Remedy(setting, value, saved, other.fits))
    return sorted(found, key=lambda remedy: -remedy.saved)


def _candidates(config: Config, plan: Plan) -> Iterator[tuple[str, Any]]:
    """Changes that may help, of which those come to be shown that do."""
    cuda, rollout = plan.target.cuda, config.rollout
    if cuda and config.backend.autocast == "none":
        yield "backend.autocast", "bfloat16"
    if rollout.dtype == "float32" and cuda:
        yield "rollout.dtype", "bfloat16"
    if config.needs_reference and config.ref.fsdp_config.model_dtype == "float32":
        yield "ref.fsdp_config.model_dtype", "bfloat16"
    if config.reward_model.path is not None and config.reward_model.fsdp_config.model_dtype == "float32":
        yield "reward_model.fsdp_config.model_dtype", "bfloat16"
    if not config.model.enable_gradient_checkpointing:
        yield "model.enable_gradient_checkpointing", True
    if config.model.attn_implementation == "eager":
        yield "model.attn_implementation", "sdpa"
    if not config.model.lora.enabled and not plan.fits:
        yield "model.lora.enabled", True
    longest, budgets = longest_sample(config), config.token_budgets
    for setting, budget in (
        ("actor.ppo_max_token_len_per_gpu", budgets.actor),
        ("critic.ppo_max_token_len_per_gpu", budgets.critic),
        ("reward_model.forward_max_token_len_per_gpu", budgets.reward_model),
    ):
        for smaller in sorted({max(longest, budget // 2), longest}, reverse=True):
            if smaller < budget:
                yield setting, smaller
    if cuda and rollout.name == "vllm":
        yield "rollout.sleep_level", 2
        yield "rollout.tensor_model_parallel_size", 2 * rollout.tensor_model_parallel_size
        engine = plan.peak.items.get("engine weights", 0) + plan.peak.items.get("engine cache", 0)
        if plan.target.memory is not None and engine:
            left = (plan.target.memory - plan.peak.total + engine) / plan.target.memory
            least = 1.1 * plan.peak.items.get("engine weights", 0) / plan.target.memory
            if least < (share := math.floor(20 * left) / 20) < rollout.gpu_memory_utilization:
                yield "rollout.gpu_memory_utilization", share
    if cuda and rollout.name == "embedded":
        yield "rollout.name", "vllm"
    if rollout.name == "embedded" and rollout.max_num_seqs > 1:
        yield "rollout.max_num_seqs", rollout.max_num_seqs // 2
    yield from _offloads(config, plan)
    if not config.backend.reshard_after_forward:
        yield "backend.reshard_after_forward", True
    if config.backend.dp_replicate > 1:
        yield "backend.dp_replicate", 1
    if config.backend.name == "deepspeed":
        for stage in range(config.backend.zero_stage + 1, 4):
            yield "backend.zero_stage", stage
        if cuda and config.backend.zero_stage and not config.backend.offload_optimizer:
            yield "backend.offload_optimizer", True
    if not cuda and config.checkpoint.async_save:
        yield "checkpoint.async_save", False
    if cuda:
        yield "trainer.nproc", 2 * plan.target.ranks
    yield "data.max_response_length", config.data.max_response_length // 2


def _offloads(config: Config, plan: Plan) -> Iterator[tuple[str, Any]]:
    """What may leave the device while it sits idle."""
    sections: dict[str, Any] = {"actor": config.actor, "critic": config.critic}
    sections |= {"ref": config.ref, "reward_model": config.reward_model}
    for name, section in sections.items():
        for setting, value in vars(section.fsdp_config).items():
            if plan.target.cuda and value is False:
                yield f"{name}.fsdp_config.{setting}", True
