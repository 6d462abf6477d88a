"""Finds settings that lower the peak of a memory plan, by planning again with each change."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Literal

from rlhf.config import Config
from rlhf.config.derived import longest_sample
from rlhf.config.known_settings import SETTINGS
from rlhf.config.overrides import hydra_value
from rlhf.config.rules.validate import validate
from rlhf.errors import UserError
from rlhf.planning.memory_plan import Models, Plan, Target, memory_plan


@dataclass(frozen=True)
class Remedy:
    """A change of one setting."""

    setting: str
    value: Any
    saved: int
    """Bytes by which the peak of a rank's device falls."""
    fits: bool
    """Whether the run fits with only this change."""

    def __str__(self) -> str:
        return override(self.setting, self.value)


Effect = Literal["speed", "precision", "training", "devices"]
Values = Callable[[Config, Plan], Iterable[Any]]


@dataclass(frozen=True)
class Candidate:
    """A setting that may lower the peak."""

    setting: str
    values: Values
    """Returns the values to try, which may include the current value."""
    current: Any = None
    """The change applies only if the setting has this value now; None if it applies to every value."""
    device: Literal["cuda", "cpu"] | None = None
    """Type of device on which the setting matters; None for both."""
    effect: Effect = "speed"
    """Main effect of the change: on speed, precision, training, or the number of devices."""


def _to(value: Any) -> Values:
    return lambda config, plan: (value,)


def _half(setting: str) -> Values:
    return lambda config, plan: (SETTINGS[setting].value(config) // 2,)


def _smaller_budgets(role: str) -> Values:
    """Try half the tokens of a pass, and the tokens of the longest sample."""

    def values(config: Config, plan: Plan) -> Iterable[int]:
        longest, budget = longest_sample(config.data), getattr(config.token_budgets, role)
        return [size for size in sorted({max(longest, budget // 2), longest}, reverse=True) if size < budget]

    return values


def _smaller_share(config: Config, plan: Plan) -> Iterable[float]:
    """Return the fraction of a GPU that the rest of the peak leaves to the engine.

    Return nothing if `rollout.gpu_memory_utilization` is null or not higher, if the peak has no engine cache, or if the
    engine's weights do not fit into the fraction.
    """
    given, memory = config.rollout.gpu_memory_utilization, plan.target.memory
    engine = sum(size for name, size in plan.peak.items.items() if name.startswith("engine "))
    if memory is None or given is None or "engine cache" not in plan.peak.items:
        return []
    share = math.floor(20 * (memory - plan.peak.total + engine) / memory) / 20
    return [share] if 1.1 * plan.peak.items["engine weights"] / memory < share < given else []


TABLE = (
    Candidate("backend.autocast", _to("bfloat16"), current="none", device="cuda", effect="precision"),
    Candidate("rollout.dtype", _to("bfloat16"), current="float32", device="cuda", effect="precision"),
    Candidate("ref.fsdp_config.model_dtype", _to("bfloat16"), effect="precision"),
    Candidate("reward_model.fsdp_config.model_dtype", _to("bfloat16"), effect="precision"),
    Candidate("model.enable_gradient_checkpointing", _to(True)),
    Candidate("model.attn_implementation", _to("sdpa"), current="eager"),
    Candidate("model.lora.enabled", lambda config, plan: () if plan.fits else (True,), effect="training"),
    Candidate("actor.ppo_max_token_len_per_gpu", _smaller_budgets("actor")),
    Candidate("critic.ppo_max_token_len_per_gpu", _smaller_budgets("critic")),
    Candidate("reward_model.forward_max_token_len_per_gpu", _smaller_budgets("reward_model")),
    Candidate("rollout.sleep_level", _to(2), device="cuda"),
    Candidate(
        "rollout.tensor_model_parallel_size",
        lambda config, plan: (2 * config.rollout.tensor_model_parallel_size,),
        device="cuda",
    ),
    Candidate("rollout.gpu_memory_utilization", _smaller_share, device="cuda"),
    Candidate("rollout.name", _to("vllm"), current="embedded", device="cuda"),
    Candidate("rollout.max_num_seqs", _half("rollout.max_num_seqs")),
    Candidate("actor.fsdp_config.param_offload", _to(True), device="cuda"),
    Candidate("actor.fsdp_config.optimizer_offload", _to(True), device="cuda"),
    Candidate("critic.fsdp_config.param_offload", _to(True), device="cuda"),
    Candidate("critic.fsdp_config.optimizer_offload", _to(True), device="cuda"),
    Candidate("ref.fsdp_config.param_offload", _to(True), device="cuda"),
    Candidate("reward_model.fsdp_config.param_offload", _to(True), device="cuda"),
    Candidate("backend.reshard_after_forward", _to(True)),
    Candidate("backend.dp_replicate", _to(1)),
    Candidate("backend.zero_stage", lambda config, plan: range(config.backend.zero_stage + 1, 4)),
    Candidate("backend.offload_optimizer", _to(True), device="cuda"),
    Candidate("checkpoint.async_save", _to(False), device="cpu"),
    Candidate("checkpoint.memory.replicas", _to(0), device="cpu"),
    Candidate("checkpoint.memory.freq", _to(0), device="cpu"),
    Candidate("trainer.nproc", lambda config, plan: (2 * plan.target.ranks,), device="cuda", effect="devices"),
    Candidate("data.max_response_length", _half("data.max_response_length"), effect="training"),
)


def remedies(config: Config, models: Models, plan: Plan) -> list[Remedy]:
    """Return the allowed changes that lower the peak by at least one percent, the largest saving first."""
    found = []
    for row, value in candidates(config, plan):
        target = plan.target if row.effect != "devices" else replace(plan.target, ranks=value)
        changed = changed_config(config, {row.setting: value})
        if not is_allowed(changed, target):
            continue
        other = memory_plan(changed, models, target)
        saved = plan.peak.total - other.peak.total
        if saved * 100 >= plan.peak.total and other.engine_starts >= plan.engine_starts:
            found.append(Remedy(row.setting, value, saved, other.fits))
    return sorted(found, key=lambda remedy: -remedy.saved)


def candidates(config: Config, plan: Plan) -> Iterator[tuple[Candidate, Any]]:
    """Yield the rows of `TABLE` that apply, each with a value that differs from the current one."""
    device = "cuda" if plan.target.cuda else "cpu"
    for row in TABLE:
        present = SETTINGS[row.setting].value(config)
        if row.device in (None, device) and row.current in (None, present):
            yield from ((row, value) for value in row.values(config, plan) if value != present)


def is_allowed(config: Config, target: Target) -> bool:
    """Return whether the rules across settings allow the run on the target's ranks."""
    try:
        validate(config, {"RANK": "0", "WORLD_SIZE": str(target.ranks)}, here=False)
    except UserError:
        return False
    return True


def changed_config(config: Config, values: Mapping[str, Any]) -> Config:
    """Return a copy of `config` with other `values` of settings."""
    changed = deepcopy(config)
    for setting, value in values.items():
        section, _, name = setting.rpartition(".")
        setattr(attrgetter(section)(changed), name, value)
    return changed


def override(setting: str, value: Any) -> str:
    """Return the override for a changed setting. The configuration group `rollout` chooses the engine."""
    return f"{'rollout' if setting == 'rollout.name' else setting}={hydra_value(value)}"
