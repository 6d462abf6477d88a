"""Builds the training engines of a run's models, and loads the weights into them."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from rlhf.assemble.model_sources import ResolvedModel
from rlhf.backends import build_backend
from rlhf.backends.base import PolicyWeights, TrainingBackend
from rlhf.backends.fsdp2 import Fsdp2Model, Fsdp2Policy
from rlhf.backends.training import Training
from rlhf.config import ActorConfig, BackendConfig, CriticConfig, FrozenFsdpConfig, LoraConfig, ModelConfig
from rlhf.config.derived import frozen_dtype
from rlhf.learning.actor import Actor
from rlhf.learning.critic import Critic
from rlhf.learning.reference import Reference
from rlhf.learning.utilization import Utilization
from rlhf.models import loading
from rlhf.models.adapter_config import adapter_config
from rlhf.models.adapter_layers import Adapters
from rlhf.models.adapter_start import copy_slice, fill_from_folder, fill_from_seed
from rlhf.models.model_files import on_every_rank
from rlhf.models.packing_probe import choose_packing
from rlhf.models.skeleton import cast_parameters
from rlhf.models.weights import PendingModel
from rlhf.ranks.coordinator import Coordinator
from rlhf.storage.hf_layout import ADAPTER_CONFIG


@dataclass(frozen=True)
class Learners:
    """Actor, critic and reference of a run, with the utilization of the devices."""

    actor: Actor
    critic: Critic | None
    reference: Reference | None
    utilization: Utilization

    @property
    def moving_reference(self) -> Reference | None:
        """The reference if its weights change during the run, otherwise None."""
        return self.reference if self.reference is not None and self.reference.moves else None

    @property
    def backends(self) -> dict[str, TrainingBackend]:
        engines = {"actor": self.actor.backend}
        return engines if self.critic is None else engines | {"critic": self.critic.backend}


@dataclass(frozen=True)
class EngineBuilder:
    """Builds the training engines of actor and critic, and loads the models' weights into them.

    Args:
        mini_batches: optimizer steps per epoch over a step's batch.
        seed: the run's seed, for the random start values of adapters.
    """

    model: ModelConfig
    backend: BackendConfig
    mini_batches: int
    seed: int
    device: torch.device

    def build(
        self, section: ActorConfig | CriticConfig, found: ResolvedModel, loaded: PendingModel, training_steps: int
    ) -> TrainingBackend:
        """Put a model into a training engine and load its weights. Collective.

        Args:
            section: settings of the actor or the critic.
            training_steps: steps of the run in which the model is trained, for the learning-rate schedule.
        """
        model, lora = loaded.model, self.model.lora
        if self.model.enable_gradient_checkpointing:
            # Newer transformers (5.2x) warn about the old name.
            enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
            enable({"use_reentrant": False})
        generation: Any = getattr(model, "generation_config", None)
        updates = self.mini_batches * section.ppo_epochs
        small_files = loading.hf_files(model.config, found.tokenizer, generation, found.hf_config)
        training = Training(
            section.optim,
            grad_clip=section.grad_clip,
            total_optimizer_steps=training_steps * updates,
            updates_per_step=updates,
            hf_files=small_files | adapter_files(self.model, model),
            offload=section.fsdp_config,
        )
        backend = build_backend(model, self.backend, self.device, training)
        loaded.fill(backend.base_shards() or backend.model_shards())
        who = "actor" if isinstance(section, ActorConfig) else "critic"
        if who == "actor" and lora.enabled:
            init_adapters(backend, lora, self.seed)
        backend.after_load()
        with backend.on_device():
            choose_packing(backend.module, section.use_remove_padding, f"{who}.use_remove_padding")
        return backend


def build_frozen(
    loaded: PendingModel, config: BackendConfig, kept: FrozenFsdpConfig, device: torch.device, *, moves: bool = False
) -> Fsdp2Model:
    """Shard a model without an optimizer over the ranks and load its weights. Collective.

    `moves`: whether the model is a moving reference (`ref.update_freq`).
    """
    cast_parameters(loaded.model, getattr(torch, frozen_dtype(kept, config, moves=moves)))
    plain = loaded.model.requires_grad_(False).eval()
    model = Fsdp2Model(plain, config, device, param_offload=kept.param_offload, moves=moves)
    loaded.fill(model.model_shards())
    return model


def adapter_files(settings: ModelConfig, model: PreTrainedModel) -> dict[str, bytes]:
    """Return the content of adapter_config.json by file name; an empty dict if `model` has no adapters."""
    adapters = Adapters.of(model)
    if adapters is None:
        return {}
    names = (name for name, _ in adapters.trained(model.named_parameters()))
    document = adapter_config(asdict(settings.lora), names, settings.path, model.config.model_type)
    return {ADAPTER_CONFIG: (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()}


def init_adapters(backend: PolicyWeights, lora: LoraConfig, seed: int) -> None:
    """Initialise the adapters of a model whose base weights are loaded. Collective."""
    shards, adapters = backend.model_shards(), Adapters.of(backend.module)
    assert adapters is not None
    fill_from_seed(shards, seed)
    for name, norms in adapters.norms(backend.base_tensors()) if lora.use_dora else ():
        copy_slice(shards[name], norms)


def load_adapters(backend: TrainingBackend | Fsdp2Policy, lora: LoraConfig, coordinator: Coordinator) -> None:
    """Load the adapters in `model.lora.path`, if set, at the start of a run without a checkpoint. Collective.

    Raises:
        UserError: on every rank, if the folder's adapters do not fit the model.
    """
    if lora.enabled and lora.path is not None:
        shards, folder = backend.model_shards(), Path(lora.path).expanduser()
        on_every_rank(lambda: fill_from_folder(shards, folder), coordinator)
        backend.after_load()
