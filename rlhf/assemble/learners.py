"""Learners of a run: actor, critic and reference policy in their training engines, filled with their weights."""

import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from rlhf.assemble.found_models import Found, FoundModels
from rlhf.backends import build_backend
from rlhf.backends.base import TrainingBackend
from rlhf.backends.fsdp2 import Fsdp2Model
from rlhf.backends.training import Training
from rlhf.config import ActorConfig, BackendConfig, Config, CriticConfig, FrozenFsdpConfig, LoraConfig, ModelConfig
from rlhf.config.derived import base_dtype, compute_dtype, loss_scale, mini_batches, needs_reference
from rlhf.learning.actor import Actor
from rlhf.learning.critic import Critic
from rlhf.learning.reference import Reference
from rlhf.learning.utilization import Utilization
from rlhf.models import loading
from rlhf.models.adapter_config import adapter_config
from rlhf.models.adapter_layers import Adapters, add_adapters, without_adapters
from rlhf.models.adapter_start import fill_from_folder, fill_from_seed, put
from rlhf.models.flops import UpdateFlops, peak_flops
from rlhf.models.log_prob_probe import check_log_probs
from rlhf.models.model_files import on_every_rank
from rlhf.models.packing import is_packed, pack
from rlhf.models.packing_probe import choose_packing
from rlhf.models.skeleton import hold_in
from rlhf.models.weights import Loaded
from rlhf.ranks.coordinator import Coordinator
from rlhf.storage.hf_layout import ADAPTER_CONFIG


@dataclass(frozen=True)
class Learners:
    """The models that a step trains or compares with."""

    actor: Actor
    critic: Critic | None
    reference: Reference | None
    utilization: Utilization

    @property
    def moving_reference(self) -> Reference | None:
        """The reference, if it departs from the starting weights."""
        return self.reference if self.reference is not None and self.reference.moves else None

    @property
    def backends(self) -> dict[str, TrainingBackend]:
        """The engines of the models in training, by the name that a checkpoint has them under."""
        engines = {"actor": self.actor.backend}
        return engines if self.critic is None else engines | {"critic": self.critic.backend}


def build_learners(
    config: Config,
    models: FoundModels,
    policy: Loaded,
    total_steps: int,
    coordinator: Coordinator,
    device: torch.device,
) -> Learners:
    """Load the models and spread them over the ranks. Collective.

    Args:
        policy: the actor's model; its weights are still in their files.
        total_steps: of the run, for the learning-rate schedules.
    """
    temperature, budgets = config.rollout.temperature, config.token_budgets
    reference, lora = None, config.model.lora
    compares = needs_reference(config.actor, config.algorithm)
    if lora.enabled:
        add_adapters(policy.model, lora, getattr(torch, base_dtype(lora, config.backend)))
    elif compares:
        start = models.policy.load(loading.load_model, coordinator, device)
        model = frozen(start, config.backend, config.ref.fsdp_config, device)
        with model.on_device():
            check_log_probs(model.module, device)
        reference = Reference(model, temperature, budgets.reference, config.ref)

    dtype = getattr(torch, compute_dtype(config.backend))
    peak = peak_flops(torch.cuda.get_device_name(device), dtype) if device.type == "cuda" else None
    utilization = Utilization(None if peak is None else peak * coordinator.world_size)
    utilization.add("actor", UpdateFlops.of(policy.model), config.actor.ppo_epochs)
    scale = loss_scale(config.actor, config.data)
    actor_steps = max(1, total_steps - config.trainer.critic_warmup)
    backend = _trained(config, config.actor, models.policy, policy, actor_steps, coordinator, device)
    if lora.enabled and compares:
        apart = partial(without_adapters, backend.module)
        reference = Reference(backend, temperature, budgets.reference, config.ref, apart)
    with backend.on_device():
        check_log_probs(backend.module, device)
    actor = Actor(
        backend,
        config.actor,
        config.algorithm.rollout_correction,
        temperature=temperature,
        scale=scale,
        log_prob_budget=budgets.old_log_probs,
        seed=config.trainer.seed,
    )
    if reference is not None and not lora.enabled and is_packed(actor.backend.module):
        pack(model.module)  # of the actor's architecture
    critic = None
    if models.critic is not None:
        start = models.critic.load(loading.load_value_model, coordinator, device)
        utilization.add("critic", UpdateFlops.of(start.model), config.critic.ppo_epochs)
        backend = _trained(config, config.critic, models.critic, start, total_steps, coordinator, device)
        critic = Critic(backend, config.critic, scale=scale, budget=budgets.critic, forward_budget=budgets.values)
    return Learners(actor, critic, reference, utilization)


def frozen(loaded: Loaded, config: BackendConfig, kept: FrozenFsdpConfig, device: torch.device) -> Fsdp2Model:
    """A model without an optimizer, spread over the ranks with its weights. Collective."""
    hold_in(loaded.model, getattr(torch, kept.model_dtype))
    plain = loaded.model.requires_grad_(False).eval()
    model = Fsdp2Model(plain, config, device, param_offload=kept.param_offload)
    loaded.fill(model.model_shards())
    return model


def _trained(
    config: Config,
    section: ActorConfig | CriticConfig,
    found: Found,
    loaded: Loaded,
    training_steps: int,
    coordinator: Coordinator,
    device: torch.device,
) -> TrainingBackend:
    """The model of `found` in training, in so many `training_steps` of the run."""
    model = loaded.model
    if config.model.enable_gradient_checkpointing:
        # Renamed in transformers 5.2x, where the old name warns.
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
    generation: Any = getattr(model, "generation_config", None)
    updates = mini_batches(config.data, config.actor) * section.ppo_epochs
    backend = build_backend(
        model,
        config.backend,
        device,
        Training(
            section.optim,
            grad_clip=section.grad_clip,
            total_optimizer_steps=training_steps * updates,
            updates_per_step=updates,
            hf_files=loading.hf_files(model.config, found.tokenizer, generation) | adapter_files(config.model, model),
            offload=section.fsdp_config,
        ),
    )
    loaded.fill(backend.base_shards() or backend.model_shards())
    who = "actor" if isinstance(section, ActorConfig) else "critic"
    if who == "actor" and config.model.lora.enabled:
        begin_adapters(backend, config.model.lora, config.trainer.seed)
    backend.after_load()
    with backend.on_device():
        choose_packing(backend.module, section.use_remove_padding, f"{who}.use_remove_padding")
    return backend


def adapter_files(settings: ModelConfig, model: PreTrainedModel) -> dict[str, bytes]:
    """adapter_config.json, of a model that has adapters."""
    adapters = Adapters.of(model)
    if adapters is None:
        return {}
    names = (name for name, _ in adapters.trained(model.named_parameters()))
    document = adapter_config(asdict(settings.lora), names, settings.path, model.config.model_type)
    return {ADAPTER_CONFIG: (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()}


def begin_adapters(backend: TrainingBackend, lora: LoraConfig, seed: int) -> None:
    """Give the adapters of a model that has its own weights already the values that they begin with where nothing else
    says so. Collective."""
    shards, adapters = backend.model_shards(), Adapters.of(backend.module)
    assert adapters is not None
    fill_from_seed(shards, seed)
    for name, norms in adapters.norms(backend.base_tensors()) if lora.use_dora else ():
        put(shards[name], norms)


def read_adapters(backend: TrainingBackend, lora: LoraConfig, coordinator: Coordinator) -> None:
    """Give the adapters the values in `model.lora.path`, if there is one: where a run begins, and no checkpoint holds
    them. Collective.

    Raises:
        UserError: it holds others; on every rank.
    """
    if lora.enabled and lora.path is not None:
        shards, folder = backend.model_shards(), Path(lora.path).expanduser()
        on_every_rank(lambda: fill_from_folder(shards, folder), coordinator)
        backend.after_load()
