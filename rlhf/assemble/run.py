"""Every component of one rank, from the resolved configuration: data and settings are checked before weights load."""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from rlhf.algorithms.table import needs_critic, needs_greedy_baseline, needs_reference
from rlhf.backends import build_backend, check_backend
from rlhf.backends.base import TrainingBackend
from rlhf.backends.fsdp2 import Fsdp2Model
from rlhf.checkpoint.checkpointer import Checkpointer
from rlhf.checkpoint.commit.identity import Identity
from rlhf.checkpoint.driver_state import DriverState
from rlhf.checkpoint.resolved_config import ResolvedConfig
from rlhf.checkpoint.run_file import read_run_file
from rlhf.checkpoint.save.snapshot import RunState
from rlhf.checkpoint.start.run_dir import planned_steps
from rlhf.config import ActorConfig, Config, CriticConfig
from rlhf.config.compare import check_resume
from rlhf.config.resolved import from_yaml, to_yaml
from rlhf.data import PromptSet, PromptStream, build_train_set, build_val_set
from rlhf.errors import UserError
from rlhf.events import subscribe
from rlhf.experience.collector import Collector
from rlhf.experience.evaluation import Evaluator
from rlhf.experience.generation import Generation
from rlhf.experience.journal import Journal
from rlhf.experience.policy_sampler import PolicySampler
from rlhf.experience.prompt_share import PromptShare
from rlhf.learning.actor import Actor
from rlhf.learning.credit import Advantages
from rlhf.learning.critic import Critic
from rlhf.learning.guards import Guards
from rlhf.learning.reference import Reference
from rlhf.loop import Components
from rlhf.models import loading, weights
from rlhf.models.loading import ModelSource
from rlhf.models.model_files import ModelFiles, find_files
from rlhf.models.weights import Loaded
from rlhf.ranks import collectives
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.rng import seed_everything
from rlhf.ranks.status import StatusWriter
from rlhf.ranks.stop import PreemptionFlag
from rlhf.reward import Reward, build_reward
from rlhf.reward.reward_model import RewardModel
from rlhf.rollout import RolloutEngine, SamplingParams, build_embedded_engine, check_lengths, eos_token_ids
from rlhf.storage.state import Stateful
from rlhf.tracking import Progress, Tracker
from rlhf.tracking.run_log import RunLog

AFTER_THE_STEP = ("evaluation.", "metrics.", "commit.", "end.")
"""Events once the driver has counted the step done."""


@dataclass(frozen=True)
class Found:
    """A model's files, looked into before any weights are loaded."""

    files: ModelFiles
    hf_config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase

    def load(self, function: Callable[..., PreTrainedModel], coordinator: Coordinator, device: torch.device) -> Loaded:
        """The model that `function`, one of the `load_...` of `rlhf.models.loading`, makes of it. Collective."""
        load_from = partial(function, self.files.source, self.files.folder, self.hf_config, torch.float32)
        return weights.load(self.files, self.hf_config, load_from, coordinator, device)


def build(config: Config, device: torch.device, coordinator: Coordinator, status: StatusWriter) -> Components:
    """Every component of this rank, brought to the newest checkpoint. Collective."""
    with tempfile.TemporaryDirectory(prefix="rlhf-model-files-") as scratch:
        return _build(config, device, coordinator, status, Path(scratch))


def _build(
    config: Config, device: torch.device, coordinator: Coordinator, status: StatusWriter, scratch: Path
) -> Components:
    check_backend(config.backend, device)
    seed_everything(config.trainer.seed, coordinator.rank)
    preemption = PreemptionFlag()
    models = _find_models(config, coordinator, device, scratch)
    policy = models["model.path"]
    check_lengths(policy.hf_config, config.data.max_prompt_length, config.data.max_response_length)
    train_set, val_set = _prompt_sets(config, policy.tokenizer, coordinator)

    stream = PromptStream(
        train_set, config.trainer.seed, config.data.shuffle, allow_change=config.trainer.allow_config_change
    )
    batch_size, mini_batch_size = config.data.train_batch_size, config.actor.ppo_mini_batch_size
    prompts = PromptShare(stream, batch_size, mini_batch_size, coordinator.rank, coordinator.world_size)
    steps_per_epoch = len(train_set) / batch_size
    total_steps = planned_steps(config.trainer, steps_per_epoch)
    driver = DriverState(read_run_file(config.run_dir)["run_id"], total_steps, steps_per_epoch)
    subscribe(lambda event: status.event(driver.step + (not event.startswith(AFTER_THE_STEP)), event))

    reward = _reward(config, models, coordinator, device)
    actor_model = policy.load(loading.load_model, coordinator, device)
    engine = _engine(config, policy, actor_model.model, coordinator, device)
    reference = None
    if needs_reference(config):
        frozen = _frozen(policy.load(loading.load_model, coordinator, device), config, device)
        reference = Reference(frozen, config.rollout.temperature, config.ref)
    mini_batches = batch_size // mini_batch_size
    actor_steps = max(1, total_steps - config.trainer.critic_warmup) * mini_batches
    backend = _backend(config, config.actor, policy, actor_model, device, actor_steps)
    roles: dict[str, TrainingBackend] = {"actor": backend}
    critic = None
    if needs_critic(config):
        found = models.get("critic.path", policy)
        value_model = found.load(loading.load_value_model, coordinator, device)
        roles["critic"] = _backend(config, config.critic, found, value_model, device, total_steps * mini_batches)
        critic = Critic(roles["critic"], config, mini_batches)

    rollout, greedy = config.rollout, config.rollout.val_kwargs
    longest, stop = config.data.max_response_length, tuple(rollout.stop)
    params = SamplingParams(
        rollout.n, rollout.temperature, rollout.top_p, rollout.top_k, longest, stop, rollout.ignore_eos
    )
    val_params = SamplingParams(greedy.n, greedy.temperature, greedy.top_p, greedy.top_k, longest, stop)
    sampler = PolicySampler(engine, backend, config.trainer.seed)
    fingerprints = {name: found.files.fingerprint for name, found in models.items()}
    journal = None
    if config.checkpoint.journal:
        journal = Journal(config, driver.run_id, fingerprints | {"prompts": train_set.fingerprint}, coordinator)
    greedily = needs_greedy_baseline(config)
    generation = Generation(config, sampler, params, greedily, reward, policy.tokenizer, coordinator, driver, journal)
    collector = Collector(config, prompts, generation, coordinator, driver, device)
    advantages, guards = Advantages(config.algorithm, rollout.n), Guards(config.guards, quiet=not coordinator.is_leader)
    parts: dict[str, Stateful] = {"data": stream, "kl_control": advantages, "guards": guards}
    moving = reference if reference is not None and reference.moves else None
    if moving is not None:
        parts["reference"] = moving
    resolved = ResolvedConfig(to_yaml(config), lambda stored: check_resume(from_yaml(stored), config))
    checkpointer = Checkpointer(
        config.run_dir,
        config.trainer,
        config.checkpoint,
        resolved,
        Identity.of_run(config.backend.name, resolved.text, fingerprints),
        coordinator,
        RunState(roles, driver, parts, moving, collector),
    )
    resumed = checkpointer.resume()
    leads = coordinator.is_leader
    run_log = RunLog(
        Tracker(config, config.run_dir, driver.run_id) if leads else None,
        Progress(config, total_steps) if leads else Progress.silent(),
    )
    run_log.start(driver.step, resumed=resumed)
    return Components(
        config=config,
        collector=collector,
        engine=engine,
        actor=Actor(backend, config, mini_batches),
        critic=critic,
        reference=reference,
        advantages=advantages,
        guards=guards,
        evaluator=Evaluator(val_set, sampler, val_params, reward, policy.tokenizer, coordinator, config.trainer),
        checkpointer=checkpointer,
        run_log=run_log,
        driver=driver,
        reward=reward,
        resumed=resumed,
        stop_requested=lambda: collectives.any_rank(preemption.requested, device),
    )


def _find_models(config: Config, coordinator: Coordinator, device: torch.device, scratch: Path) -> dict[str, Found]:
    """The models that the run needs, by the setting that names them."""
    sources = [ModelSource.of_policy(config)]
    if needs_critic(config):
        sources.append(ModelSource.of_critic(config))
    if "reward_model" in config.reward.functions:
        sources.append(ModelSource.of_reward_model(config))
    found = {}
    for source in sources:
        if source.setting in found:
            continue
        files = find_files(source, config.model.loading, coordinator, device, scratch)
        hf_config = loading.load_model_config(files.source, files.folder)
        found[source.setting] = Found(files, hf_config, loading.load_tokenizer(files.source, files.folder))
    critic = found.get("critic.path")
    if critic is not None and critic.tokenizer.get_vocab() != found["model.path"].tokenizer.get_vocab():
        raise UserError(
            f"{critic.files.source} has another vocabulary than {found['model.path'].files.source}: the critic reads the policy's tokens. "
            "Take a model with the same tokenizer, or critic.path=null."
        )
    return found


def _prompt_sets(
    config: Config, tokenizer: PreTrainedTokenizerBase, coordinator: Coordinator
) -> tuple[PromptSet, PromptSet | None]:
    train_set, val_set = build_train_set(config, tokenizer), build_val_set(config, tokenizer)
    if len(set(coordinator.gather(train_set.fingerprint))) > 1:
        raise UserError(
            f"The ranks read different training prompts from {config.data.train_files or config.data.reasoning_gym}: give every node the "
            "same files, and set PYTHONHASHSEED=0 for all ranks (some reasoning-gym tasks depend on it; our own supervisor sets it)."
        )
    return train_set, val_set


def _frozen(loaded: Loaded, config: Config, device: torch.device) -> Fsdp2Model:
    model = Fsdp2Model(loaded.model.requires_grad_(False).eval(), config.backend, device)
    loaded.fill(model.model_shards())
    return model


def _reward(config: Config, models: Mapping[str, Found], coordinator: Coordinator, device: torch.device) -> Reward:
    found = models.get("reward_model.path")
    if found is None:
        return build_reward(config.reward)
    module: Any = _frozen(found.load(loading.load_reward_model, coordinator, device), config, device).module
    return build_reward(config.reward, RewardModel(module, found.tokenizer, config.reward_model, device))


def _engine(
    config: Config, policy: Found, model: PreTrainedModel, coordinator: Coordinator, device: torch.device
) -> RolloutEngine:
    if config.rollout.name == "embedded":
        return build_embedded_engine(model, policy.tokenizer, config.rollout, device)
    # Its weights come with the first update; what it reads of the model are these files.
    generation: Any = getattr(model, "generation_config", None)
    files = loading.hf_files(model.config, policy.tokenizer, generation)
    eos = eos_token_ids(model, policy.tokenizer)
    if config.rollout.name == "vllm":
        from rlhf.rollout.vllm.colocated import build_vllm_engine

        return build_vllm_engine(config, files, eos, coordinator, device)
    from rlhf.rollout.servers.server_engine import build_server_engine

    return build_server_engine(config, files, eos, coordinator, device)


def _backend(
    config: Config,
    role: ActorConfig | CriticConfig,
    found: Found,
    loaded: Loaded,
    device: torch.device,
    steps_per_pass: int,
) -> TrainingBackend:
    """The model of `found` in training; `steps_per_pass`: the run's optimizer steps if each batch is walked once."""
    model = loaded.model
    if config.model.enable_gradient_checkpointing:
        # Renamed in transformers 5.2x, where the old name warns.
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
    generation: Any = getattr(model, "generation_config", None)
    backend = build_backend(
        model,
        config.backend,
        role.optim,
        device,
        grad_clip=role.grad_clip,
        total_optimizer_steps=steps_per_pass * role.ppo_epochs,
        hf_files=loading.hf_files(model.config, found.tokenizer, generation),
    )
    loaded.fill(backend.model_shards())
    backend.after_load()
    return backend
