"""Learners of a run: the engines that train models or keep them, filled with their weights."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from rlhf.assemble.found_models import Found
from rlhf.backends import build_backend
from rlhf.backends.base import TrainingBackend
from rlhf.backends.fsdp2 import Fsdp2Model
from rlhf.backends.training import Training
from rlhf.config import ActorConfig, BackendConfig, CriticConfig, FrozenFsdpConfig, LoraConfig, ModelConfig
from rlhf.learning.actor import Actor
from rlhf.learning.critic import Critic
from rlhf.learning.reference import Reference
from rlhf.learning.utilization import Utilization
from rlhf.models import loading
from rlhf.models.adapter_config import adapter_config
from rlhf.models.adapter_layers import Adapters
from rlhf.models.adapter_start import fill_from_folder, fill_from_seed, put
from rlhf.models.model_files import on_every_rank
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


@dataclass(frozen=True)
class Engines:
    """Puts loaded models into the engines that train them, or keep them as they are.

    Args:
        mini_batches: optimizer steps per pass over a batch.
        seed: of the run, for adapters that begin with random values.
    """

    model: ModelConfig
    backend: BackendConfig
    mini_batches: int
    seed: int
    device: torch.device

    def frozen(self, loaded: Loaded, kept: FrozenFsdpConfig) -> Fsdp2Model:
        """A model without an optimizer, spread over the ranks with its weights. Collective."""
        return frozen(loaded, self.backend, kept, self.device)

    def trained(
        self, section: ActorConfig | CriticConfig, found: Found, loaded: Loaded, training_steps: int
    ) -> TrainingBackend:
        """The model of `found` in training, in so many `training_steps` of the run. Collective."""
        model, lora = loaded.model, self.model.lora
        if self.model.enable_gradient_checkpointing:
            # Renamed in transformers 5.2x, where the old name warns.
            enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
            enable({"use_reentrant": False})
        generation: Any = getattr(model, "generation_config", None)
        updates = self.mini_batches * section.ppo_epochs
        training = Training(
            section.optim,
            grad_clip=section.grad_clip,
            total_optimizer_steps=training_steps * updates,
            updates_per_step=updates,
            hf_files=loading.hf_files(model.config, found.tokenizer, generation) | adapter_files(self.model, model),
            offload=section.fsdp_config,
        )
        backend = build_backend(model, self.backend, self.device, training)
        loaded.fill(backend.base_shards() or backend.model_shards())
        who = "actor" if isinstance(section, ActorConfig) else "critic"
        if who == "actor" and lora.enabled:
            begin_adapters(backend, lora, self.seed)
        backend.after_load()
        with backend.on_device():
            choose_packing(backend.module, section.use_remove_padding, f"{who}.use_remove_padding")
        return backend


def frozen(loaded: Loaded, config: BackendConfig, kept: FrozenFsdpConfig, device: torch.device) -> Fsdp2Model:
    """A model without an optimizer, spread over the ranks with its weights. Collective."""
    hold_in(loaded.model, getattr(torch, kept.model_dtype))
    plain = loaded.model.requires_grad_(False).eval()
    model = Fsdp2Model(plain, config, device, param_offload=kept.param_offload)
    loaded.fill(model.model_shards())
    return model


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
