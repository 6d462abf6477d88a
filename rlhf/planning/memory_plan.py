"""Plan of a run's memory: bytes on a rank's device in each phase of a step, on its host, and on disk."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rlhf.config import Config, FrozenFsdpConfig, TrainedFsdpConfig
from rlhf.config.rules.algorithm_rules import needs_critic
from rlhf.planning.activations import PACKED, PassCost, TokenCost, chunk_bytes, pass_cost
from rlhf.planning.adapter_state import Adapted, adapted, adapted_state
from rlhf.planning.checkpoint_size import CheckpointSize, checkpoint_size
from rlhf.planning.model_shapes import ModelShapes
from rlhf.planning.pass_sizes import (
    PassSize,
    generated_together,
    longest_sample,
    passes,
    samples_of_rank,
    tokens_of_step,
)
from rlhf.planning.rollout_memory import EngineMemory, engine_memory
from rlhf.planning.training_state import TrainingState, compute_width, frozen_state, trained_state

CUDA_BASE = 3 << 29
"""CUDA's context, its libraries' workspaces and NCCL's buffers on a device: an allowance of 1.5 GiB."""
HOST_BASE = 390 << 20
"""A rank with its imports and no model, on a CPU (measured: Python 3.11, torch 2.13, transformers 5.23)."""
DEEPSPEED_BASE = 60 << 20
"""What a rank imports for an engine of DeepSpeed (measured: 0.19)."""
CUDA_HOST_BASE = 3 << 30
"""The same of a rank with a GPU, whose driver and kernels lie in its memory, too: an allowance."""
LOADING = "loading"
PHASES = {
    "actor": ("old log-probs", "actor update"),
    "critic": ("values", "critic update"),
    "reference": ("reference",),
    "reward model": ("rewards",),
}
"""Phases with passes of a role's model."""
TOKEN_RECORD = 16
"""Bytes of a token of a response: int32 and float32 in its sample, and the same in a copy to be sent or journaled."""


@dataclass(frozen=True)
class Models:
    """Shapes of the models that a run loads; None for those that it does not need."""

    policy: ModelShapes
    critic: ModelShapes | None = None
    reward_model: ModelShapes | None = None


@dataclass(frozen=True)
class Target:
    """The machine that a run is planned for."""

    cuda: bool
    ranks: int
    memory: int | None = None
    """Bytes that one rank may have: of its GPU, or its part of a CPU's machine. None where that is not known."""


@dataclass(frozen=True)
class Phase:
    """A phase of a step: its bytes on a rank's device by what they are for."""

    name: str
    items: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.items.values())


@dataclass(frozen=True)
class Plan:
    """Bytes of one rank."""

    target: Target
    phases: list[Phase]
    host: Mapping[str, int]
    """On a GPU's host; on a CPU it is in the phases."""
    checkpoint: CheckpointSize
    tokens_per_step: int
    tokens_per_micro_batch: int
    cached_tokens: int | None
    """Tokens that the engine's cache holds, where its size is set and not asked for."""
    sample_tokens: int
    """Tokens of the longest sample."""

    @property
    def peak(self) -> Phase:
        """The phase that takes most."""
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def fits(self) -> bool:
        """Whether no phase takes more than there is, and the engine starts, as far as that is known."""
        return self.target.memory is None or (self.peak.total <= self.target.memory and self.engine_starts)

    @property
    def engine_starts(self) -> bool:
        """Whether the cache holds the longest sample: vLLM does not start with a smaller one."""
        return self.cached_tokens is None or self.cached_tokens >= self.sample_tokens


@dataclass(frozen=True)
class _Pass:
    """A model with the engine that it is spread in, for the phases that go through it."""

    role: str
    model: ModelShapes
    state: TrainingState
    device: str
    param_offload: bool
    optimizer_offload: bool = False
    adapted: Adapted | None = None
    """The policy with its adapters, where `model` is its frozen base."""

    def resident(self, phase: str) -> dict[str, int]:
        """Bytes on the device throughout a phase; what is offloaded is still there in that in which it is loaded."""
        items = {"weights": self.state.weights, "optimizer": self.state.optimizer, "buffers": self.state.standing}
        # The reference is the actor's base.
        phases = PHASES[self.role] if self.adapted is None else (*PHASES[self.role], *PHASES["reference"])
        if self.param_offload and phase not in (*phases, LOADING):
            del items["weights"], items["buffers"]
        if self.optimizer_offload and phase != LOADING:
            del items["optimizer"]
        return {f"{self.role} {name}": size for name, size in items.items() if size}

    @property
    def host(self) -> int:
        """Bytes on the host in the device's place."""
        state = self.state
        weights = self.param_offload * (state.weights + state.standing)
        return state.host + weights + self.optimizer_offload * state.optimizer

    def forward(self, config: Config, work: PassSize) -> dict[str, int]:
        cost = self._cost(config)
        return {
            f"{self.role} gathered weights": self.state.gathered,
            "activations": cost.forward(work.tokens, work.longest),
            **self._chunk(work),
        }

    def update(self, config: Config, work: PassSize) -> dict[str, int]:
        """The largest of the moments of an optimizer step: the head's gradient is there and all activations are, the
        last layer is in its backward pass, the first one is, the embedding's gradient is reduced, the optimizer
        steps."""
        cost, state = self._cost(config), self.state
        checkpointing = config.model.enable_gradient_checkpointing
        kept = cost.kept(work.tokens, work.longest, len(self.model.layers), checkpointing=checkpointing)
        layer = cost.layer(work.tokens, work.longest)
        in_layer = kept + (layer if checkpointing else work.tokens * cost.moment)
        gathered = {f"{self.role} gathered weights": state.gathered}
        gradients = {f"{self.role} gradients": state.gradients}
        # The first micro-batch of an optimizer step finds no gradients.
        before = gathered | (gradients if work.micro_batches > 1 else {})
        reduced = f"{self.role} gradients being reduced"
        brought = {f"{self.role} optimizer": state.optimizer} if self.optimizer_offload else {}
        moments = [
            before | {"activations": kept, reduced: state.head, **self._chunk(work)},
            before | {"activations": in_layer, reduced: state.head_left + state.layer},
            gathered | gradients | {"activations": layer, reduced: state.layer},
            gradients | {reduced: state.root + (state.added if work.micro_batches > 1 else 0)},
            gradients | {"optimizer step": state.stepped, **brought},
        ]
        return max(moments, key=lambda items: sum(items.values()))

    def _cost(self, config: Config) -> PassCost:
        attention = config.model.attn_implementation
        own = {"critic": config.critic.use_remove_padding, "reward model": config.reward_model.use_remove_padding}
        packed = own.get(self.role, config.actor.use_remove_padding) is not False and attention == "sdpa"
        width = compute_width(config.backend)
        more = TokenCost() if self.adapted is None else self.adapted.token_cost(width)
        return pass_cost(self.model, width, PACKED if packed else attention, more)

    def _chunk(self, work: PassSize) -> dict[str, int]:
        if self.role not in ("actor", "reference"):
            return {}
        return {"log-prob chunks": chunk_bytes(work.predicted, self.model.vocabulary, self.device)}


def memory_plan(config: Config, models: Models, target: Target) -> Plan:
    """The plan of a run with these settings on `target`; samples are as long as the settings allow."""
    ranks = target.ranks
    device = "cuda" if target.cuda else "cpu"

    def trained(role: str, model: ModelShapes, kept: TrainedFsdpConfig) -> _Pass:
        # On a CPU what leaves the device stays in the same memory.
        away = (target.cuda and kept.param_offload, target.cuda and kept.optimizer_offload)
        return _Pass(role, model, trained_state(model, config.backend, ranks), device, *away)

    def frozen(role: str, model: ModelShapes, kept: FrozenFsdpConfig) -> _Pass:
        state = frozen_state(model, config.backend, kept, ranks)
        return _Pass(role, model, state, device, target.cuda and kept.param_offload)

    policy = None
    if config.model.lora.enabled:
        policy = adapted(models.policy, config.model.lora, config.backend)
    actor = trained("actor", models.policy, config.actor.fsdp_config)
    if policy is not None:
        actor = replace(actor, state=adapted_state(policy, config.backend, ranks), adapted=policy)
    critic = None
    if models.critic is not None and needs_critic(config):
        critic = trained("critic", models.critic, config.critic.fsdp_config)
    reference = frozen("reference", models.policy, config.ref.fsdp_config) if config.needs_reference else None
    if reference is not None and policy is not None:
        # The actor's own base, without its adapters.
        reference = replace(reference, state=TrainingState(0, gathered=actor.state.gathered))
    reward = None
    if models.reward_model is not None:
        reward = frozen("reward model", models.reward_model, config.reward_model.fsdp_config)
    engine = engine_memory(
        models.policy,
        config.rollout,
        config.data,
        generated_together(config, ranks),
        ranks,
        config.model.attn_implementation,
        target.memory if target.cuda else None,
        policy,
    )
    roles = {each.role: each.adapted or each.model for each in (actor, critic) if each is not None}
    moving = models.policy if reference is not None and config.ref.update_freq is not None else None
    checkpoint = checkpoint_size(roles, moving, config.checkpoint, ranks)
    spread = [each for each in (actor, critic, reference, reward) if each is not None]
    host = _host(config, spread, engine, checkpoint, ranks, cuda=target.cuda)
    rest = _batch(config, spread, ranks) | ({"CUDA and NCCL": CUDA_BASE} if target.cuda else host)

    def phase(name: str, items: dict[str, int]) -> Phase:
        resident = {item: size for each in spread for item, size in each.resident(name).items()}
        return Phase(name, resident | rest | items)

    return Plan(
        target,
        [phase(name, items) for name, items in _phases(config, spread, engine, ranks)],
        host if target.cuda else {},
        checkpoint,
        tokens_of_step(config),
        _walk(config, ranks, config.token_budgets.actor, mini_batch=True).tokens,
        engine.cached_tokens,
        longest_sample(config),
    )


def _walk(config: Config, ranks: int, budget: int, *, mini_batch: bool = False) -> PassSize:
    samples = samples_of_rank(config, ranks, mini_batch=mini_batch)
    return passes(samples, longest_sample(config), config.data.max_response_length, budget)


def _phases(config: Config, spread: list[_Pass], engine: EngineMemory, ranks: int) -> list[tuple[str, dict[str, int]]]:
    by_role, budgets = {each.role: each for each in spread}, config.token_budgets
    actor, resident = by_role["actor"], engine.resident
    phases: list[tuple[str, dict[str, int]]] = []
    if actor.state.loaded:
        phases.append((LOADING, {"whole weights": max(each.state.loaded for each in spread)}))
    phases += [("hand-over", engine.handing_over), ("generation", engine.generating)]
    if (reward := by_role.get("reward model")) is not None:
        longest = config.reward_model.max_length
        work = passes(samples_of_rank(config, ranks), longest, 0, budgets.reward_model)
        phases.append(("rewards", resident | reward.forward(config, work)))
    if (reference := by_role.get("reference")) is not None:
        phases.append(("reference", resident | reference.forward(config, _walk(config, ranks, budgets.reference))))
    if _asks_old_log_probs(config):
        phases.append(("old log-probs", resident | actor.forward(config, _walk(config, ranks, budgets.old_log_probs))))
    if (critic := by_role.get("critic")) is not None:
        work = _walk(config, ranks, budgets.critic, mini_batch=True)
        phases.append(("values", resident | critic.forward(config, _walk(config, ranks, budgets.values))))
        phases.append(("critic update", resident | critic.update(config, work)))
    work = _walk(config, ranks, budgets.actor, mini_batch=True)
    phases.append(("actor update", resident | actor.update(config, work)))
    phases.append(("save", dict(resident)))
    return phases


def _asks_old_log_probs(config: Config) -> bool:
    steps = config.actor.ppo_epochs * (config.data.train_batch_size // config.actor.ppo_mini_batch_size)
    return steps > 1 or config.algorithm.kl_in_reward


def _batch(config: Config, spread: list[_Pass], ranks: int) -> dict[str, int]:
    """Bytes of a rank's samples, which are on the device in every phase."""
    data = config.data
    trained = {each.role for each in spread}
    per_token = 4 * (4 + 2 * ("critic" in trained) + ("reference" in trained) + _asks_old_log_probs(config))
    longest = data.max_prompt_length + data.max_response_length
    return {"batch": samples_of_rank(config, ranks) * (8 * longest + per_token * data.max_response_length)}


def _host(
    config: Config, spread: list[_Pass], engine: EngineMemory, checkpoint: CheckpointSize, ranks: int, *, cuda: bool
) -> dict[str, int]:
    imports = CUDA_HOST_BASE if cuda else HOST_BASE
    items = {
        "Python and torch": imports + (DEEPSPEED_BASE if config.backend.name == "deepspeed" else 0),
        "copy for saves": checkpoint.copied,
        "offloaded": sum(each.host for each in spread),
        "engine's weights asleep": engine.host,
        "rollouts": samples_of_rank(config, ranks) * config.data.max_response_length * TOKEN_RECORD,
    }
    return {name: size for name, size in items.items() if size}
