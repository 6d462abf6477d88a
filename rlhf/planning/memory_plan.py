"""Plans the memory of a run: bytes on a rank's device in each phase of a step, on its host, and on disk."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from rlhf.config import ActorConfig, Config, CriticConfig, FrozenFsdpConfig, ModelConfig
from rlhf.config.derived import (
    base_dtype,
    compute_dtype,
    frozen_dtype,
    mini_batches,
    needs_critic,
    needs_old_log_probs,
    needs_reference,
)
from rlhf.models.config_check import default_attention
from rlhf.planning.activations import PACKED, PassCost, TokenCost, pass_cost
from rlhf.planning.adapter_state import Adapted, adapted, adapted_state
from rlhf.planning.checkpoint_size import CheckpointSize, checkpoint_size
from rlhf.planning.model_passes import LOADING, ModelPasses
from rlhf.planning.model_shapes import ModelShapes
from rlhf.planning.pass_sizes import StepSize, passes
from rlhf.planning.rollout_memory import EngineMemory, engine_memory, free_share
from rlhf.planning.training_state import TrainingState, compute_width, frozen_state, trained_state

CUDA_BASE, NCCL_BASE = 3 << 29, 3 << 29
"""Estimates for a device: 1.5 GiB for CUDA's context and the libraries' workspaces. With several ranks, NCCL's
communicators of the trainer and of vLLM take another 1.5 GiB."""
HOST_BASE = 390 << 20
"""Memory of a rank with its imports and no model, on a CPU (measured: Python 3.11, torch 2.13, transformers 5.23)."""
DEEPSPEED_BASE = 60 << 20
"""Host memory of DeepSpeed's imports (measured with 0.19)."""
CUDA_HOST_BASE = 3 << 30
"""Estimate for the host memory of a rank with a GPU and no model, with driver and kernels."""
ROOM_OF_REPLICAS = 2
"""A null `backend.dp_replicate` means a replica per rank if a rank's memory is at least this multiple of the planned
peak."""
TOKEN_RECORD = 16
"""Bytes per response token: int32 and float32 in its sample, and again in a copy that is sent or journaled. With
sampling masks also int32 numbers, in both: the count of kept tokens, and their ids."""


@dataclass(frozen=True)
class Models:
    """Shapes of the models that a run loads; None for a model that the run does not need."""

    policy: ModelShapes
    critic: ModelShapes | None = None
    reward_model: ModelShapes | None = None


@dataclass(frozen=True)
class Target:
    """The machine that a run is planned for."""

    cuda: bool
    ranks: int
    memory: int | None = None
    """Bytes for one rank: its GPU's memory, or on a CPU its part of the host's memory. None if unknown."""
    host_memory: int | None = None
    """Bytes of the host's memory for one rank with a GPU. None if unknown."""


@dataclass(frozen=True)
class Phase:
    """A phase of a step, with the bytes on a rank's device by use."""

    name: str
    items: Mapping[str, int]
    fills: bool = False
    """Whether vLLM's cache takes all that the other uses leave. The cache then grows when another use shrinks."""

    @property
    def total(self) -> int:
        return sum(self.items.values())


@dataclass(frozen=True)
class Plan:
    """The memory plan of one rank, in bytes."""

    target: Target
    backend: str
    replicas: int
    """Replicas of each model, each sharded over an equal part of the ranks."""
    phases: list[Phase]
    host: Mapping[str, int]
    """Bytes of host memory by use. Empty on a CPU, where the phases include them."""
    checkpoint: CheckpointSize
    tokens_per_step: int
    tokens_per_micro_batch: int
    cached_tokens: int | None
    """Tokens that fit into the engine's KV cache; None if the engine allocates on demand or runs in servers."""
    sample_tokens: int
    """Tokens of the longest sample."""
    engine_share: float | None
    """vLLM's fraction of the GPU; None for other engines, on a CPU, or if the GPU's memory is unknown."""

    @property
    def peak(self) -> Phase:
        """Return the phase with the most memory. A phase that vLLM's cache fills counts only if it does not fit."""
        decisive = [phase for phase in self.phases if not phase.fills or phase.total > (self.target.memory or 0)]
        return max(decisive or self.phases, key=lambda phase: phase.total)

    @property
    def fits(self) -> bool:
        """Return whether every phase and the planned host memory fit, and the engine starts. True if unknown."""
        memory = self.target.memory
        return memory is None or (self.peak.total <= memory and self.engine_starts and self.fits_host)

    @property
    def fits_host(self) -> bool:
        """Return whether the planned host memory fits into `target.host_memory`. True if unknown."""
        return self.target.host_memory is None or sum(self.host.values()) <= self.target.host_memory

    @property
    def engine_starts(self) -> bool:
        """Return whether the longest sample fits into the engine's cache; otherwise vLLM does not start."""
        return self.cached_tokens is None or self.cached_tokens >= self.sample_tokens


def memory_plan(config: Config, models: Models, target: Target) -> Plan:
    """Return the memory plan of a run with these settings on `target`, with samples as long as the settings allow."""
    if config.backend.dp_replicate is None:
        config = with_replicas(config, chosen_replicas(config, models, target))
    ranks = target.ranks
    step = StepSize.of(config.data, config.rollout, config.actor, config.algorithm, ranks)
    policy = adapted(models.policy, config.model.lora, config.backend) if config.model.lora.enabled else None
    by_role = _model_passes(config, models, policy, target)
    with_old_log_probs = needs_old_log_probs(config.actor, config.algorithm, mini_batches(config.data, config.actor))
    base = {"CUDA and NCCL": _cuda_base(ranks)} if target.cuda else {}
    kept = min(config.rollout.top_k, models.policy.vocabulary) if config.rollout.sampling_mask else 0
    rest = _batch(step, by_role, with_old_log_probs, kept) | base

    def resident(name: str) -> dict[str, int]:
        return rest | {item: size for each in by_role.values() for item, size in each.resident(name).items()}

    def plan_engine(taken: int) -> EngineMemory:
        return engine_memory(
            models.policy,
            config.rollout,
            config.data,
            step.together,
            ranks,
            _attention(config.model, models.policy),
            target.memory if target.cuda else None,
            taken,
            policy,
        )

    engine = plan_engine(sum(resident("generation").values()))
    if not config.rollout.sleep_level:
        # The engine keeps its cache in all phases, so the cache gets only what the largest phase leaves.
        others = _phases(config, by_role, EngineMemory({}, {}, {}), step, with_old_log_probs)
        engine = plan_engine(max(sum((resident(name) | items).values()) for name, items in others))
    trained = {role: each.adapted or each.model for role, each in by_role.items() if role in ("actor", "critic")}
    moving = models.policy if "reference" in by_role and config.ref.update_freq is not None else None
    checkpoint = checkpoint_size(trained, moving, config.checkpoint, ranks)
    host = _host(config.backend.name, by_role, engine, checkpoint, step, kept, cuda=target.cuda)
    here = {} if target.cuda else host
    derived = engine.share is not None and config.rollout.gpu_memory_utilization is None

    def phase(name: str, items: dict[str, int]) -> Phase:
        return Phase(name, resident(name) | here | items, derived and "engine cache" in items)

    return Plan(
        target,
        config.backend.name,
        config.backend.replicas,
        [phase(name, items) for name, items in _phases(config, by_role, engine, step, with_old_log_probs)],
        host if target.cuda else {},
        checkpoint,
        step.tokens,
        step.update(config.token_budgets.actor).tokens,
        engine.cached_tokens,
        step.longest,
        engine.share,
    )


def chosen_replicas(config: Config, models: Models, target: Target) -> int:
    """Return the value that a null `backend.dp_replicate` means in a run without a checkpoint.

    Ranks of different machines share one replica: machines may round differently, and their replicas would diverge.
    """
    on_one_machine = target.ranks <= config.trainer.ranks
    dtypes = {compute_dtype(config.backend), base_dtype(config.model.lora, config.backend)}
    plain = config.backend.name == "fsdp2" and dtypes == {"float32"}
    if target.cuda or target.memory is None or not (on_one_machine and plain):
        return 1
    plan = memory_plan(with_replicas(config, target.ranks), models, target)
    return target.ranks if ROOM_OF_REPLICAS * plan.peak.total <= target.memory else 1


def with_replicas(config: Config, replicas: int) -> Config:
    """Return the configuration with this `backend.dp_replicate`."""
    return replace(config, backend=replace(config.backend, dp_replicate=replicas))


def _attention(section: ModelConfig, model: ModelShapes) -> str:
    given = section.attn_implementation
    return default_attention(str(model.config.get("model_type"))) if given == "sdpa" else given


def evaluation_share(config: Config, models: Models, target: Target) -> float | None:
    """Return vLLM's fraction of a GPU in an evaluation: `rollout.gpu_memory_utilization` if set, else one that fits.

    Without the setting, return None on a CPU or if the memory is unknown.

    An evaluation has no optimizer, batch, critic or reference. Its policy waits in host memory for the weight sync.
    """
    rollout = config.rollout
    if not target.cuda or target.memory is None or rollout.gpu_memory_utilization is not None:
        return rollout.gpu_memory_utilization
    by_role = _model_passes(config, models, None, target)
    reward = by_role.get("reward model")
    taken = 0 if reward is None else sum(reward.resident("generation").values())
    if not rollout.sleep_level:
        # The engine starts first and keeps its cache. Besides the cache, the device needs room for the policy's shard
        # until the shard moves to the host, and later for the passes of the reward model.
        taken += by_role["actor"].state.weights
        if reward is not None:
            budget = config.token_budgets.reward_model
            work = passes(budget, config.reward_model.max_length, 0, budget)
            taken = max(taken, sum((reward.resident("rewards") | reward.forward(work)).values()))
    return free_share(target.memory, _cuda_base(target.ranks) + taken)


def _cuda_base(ranks: int) -> int:
    return CUDA_BASE + (NCCL_BASE if ranks > 1 else 0)


def _model_passes(config: Config, models: Models, policy: Adapted | None, target: Target) -> dict[str, ModelPasses]:
    backend, ranks, device = config.backend, target.ranks, "cuda" if target.cuda else "cpu"
    actor, critic, reward = config.actor, config.critic, config.reward_model

    def cost(model: ModelShapes, packed: bool | None, adapters: TokenCost) -> PassCost:
        attention = _attention(config.model, model)
        by_sequence = packed is not False and attention == "sdpa"
        return pass_cost(model, compute_width(backend), PACKED if by_sequence else attention, adapters)

    def frozen(
        role: str, model: ModelShapes, kept: FrozenFsdpConfig, packed: bool | None, *, moves: bool = False
    ) -> ModelPasses:
        state = frozen_state(model, backend, frozen_dtype(kept, backend, moves=moves), ranks)
        # On a CPU, offloading keeps the tensors in the same memory.
        return ModelPasses(
            role, model, state, cost(model, packed, TokenCost()), device, target.cuda and kept.param_offload
        )

    def trained(role: str, model: ModelShapes, section: ActorConfig | CriticConfig) -> ModelPasses:
        own = policy if role == "actor" else None
        return ModelPasses(
            role,
            model,
            trained_state(model, backend, ranks) if own is None else adapted_state(own, backend, ranks),
            cost(model, section.use_remove_padding, own.token_cost(compute_width(backend)) if own else TokenCost()),
            device,
            target.cuda and section.fsdp_config.param_offload,
            target.cuda and section.fsdp_config.optimizer_offload,
            config.model.enable_gradient_checkpointing,
            own,
        )

    by_role = [trained("actor", models.policy, actor)]
    if models.critic is not None and needs_critic(config.algorithm, critic):
        by_role.append(trained("critic", models.critic, critic))
    if needs_reference(actor, config.algorithm):
        moves = config.ref.update_freq is not None
        reference = frozen("reference", models.policy, config.ref.fsdp_config, actor.use_remove_padding, moves=moves)
        if policy is not None:
            # The reference is the actor's base without adapters, so it has no weights of its own.
            reference = replace(reference, state=TrainingState(0, gathered=by_role[0].state.gathered))
        by_role.append(reference)
    if models.reward_model is not None:
        by_role.append(frozen("reward model", models.reward_model, reward.fsdp_config, reward.use_remove_padding))
    return {each.role: each for each in by_role}


def _phases(
    config: Config, by_role: dict[str, ModelPasses], engine: EngineMemory, step: StepSize, with_old_log_probs: bool
) -> list[tuple[str, dict[str, int]]]:
    actor, resident, budgets = by_role["actor"], engine.resident, config.token_budgets
    phases: list[tuple[str, dict[str, int]]] = []
    if actor.state.while_building:
        phases.append((LOADING, {"whole weights": max(each.state.while_building for each in by_role.values())}))
    phases += [("weight sync", engine.syncing), ("generation", engine.generating)]
    if (reward := by_role.get("reward model")) is not None:
        work = passes(step.scored, config.reward_model.max_length, 0, budgets.reward_model)
        phases.append(("rewards", resident | reward.forward(work)))
    if (reference := by_role.get("reference")) is not None:
        phases.append(("reference", resident | reference.forward(step.whole(budgets.reference))))
    if with_old_log_probs:
        phases.append(("old log-probs", resident | actor.forward(step.whole(budgets.old_log_probs))))
    if (critic := by_role.get("critic")) is not None:
        phases.append(("values", resident | critic.forward(step.whole(budgets.values))))
        phases.append(("critic update", resident | critic.update(step.update(budgets.critic))))
    phases.append(("actor update", resident | actor.update(step.update(budgets.actor))))
    phases.append(("save", dict(resident)))
    return phases


def _batch(step: StepSize, by_role: Collection[str], with_old_log_probs: bool, kept: int) -> dict[str, int]:
    """Return the bytes of a rank's batches, which stay on the device in all phases.

    Rollout and training batch have `kept` ids of a sampling mask for each response token.
    """
    per_token = 4 * (4 + 2 * ("critic" in by_role) + ("reference" in by_role) + with_old_log_probs + 2 * kept)
    return {"batch": step.scored * (8 * step.longest + per_token * step.response)}


def _host(
    backend: str,
    by_role: Mapping[str, ModelPasses],
    engine: EngineMemory,
    checkpoint: CheckpointSize,
    step: StepSize,
    kept: int,
    *,
    cuda: bool,
) -> dict[str, int]:
    imports = CUDA_HOST_BASE if cuda else HOST_BASE
    items = {
        "Python and torch": imports + (DEEPSPEED_BASE if backend == "deepspeed" else 0),
        "copy for saves": checkpoint.copied,
        "snapshots in memory": checkpoint.published + checkpoint.snapshot,  # the copy from which a snapshot is written
        "offloaded": sum(each.host for each in by_role.values()),
        "sleeping engine's weights": engine.host,
        "rollouts": step.scored * step.response * (TOKEN_RECORD + (8 * (1 + kept) if kept else 0)),
    }
    return {name: size for name, size in items.items() if size}
