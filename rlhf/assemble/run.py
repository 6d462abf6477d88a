"""Builds all components of a rank, and finds the user's mistakes before weights are loaded."""

import logging
import math
from collections.abc import Mapping
from datetime import date
from functools import partial
from pathlib import Path

import torch

from rlhf.assemble.inputs import RunInputs, read_prompts
from rlhf.assemble.learners import EngineBuilder, Learners, build_frozen, load_adapters
from rlhf.assemble.model_sources import ModelSources, resolve_models
from rlhf.assemble.replicas import settle_replicas
from rlhf.assemble.rollouts import (
    Setup,
    build_collector,
    build_engine,
    build_episodes,
    build_evaluator,
    build_pool,
    build_reward,
)
from rlhf.backends import check_backend
from rlhf.backends.base import TrainingBackend
from rlhf.checkpoint.checkpointer import Checkpointer
from rlhf.checkpoint.commit.identity import Identity
from rlhf.checkpoint.commit.user_files import user_files
from rlhf.checkpoint.load.locations import published
from rlhf.checkpoint.start.run_dir import planned_steps
from rlhf.checkpoint.state.driver_state import DriverState
from rlhf.checkpoint.state.run_file import STARTED_ON, read_run_file
from rlhf.checkpoint.state.run_state import RunState
from rlhf.config import Config
from rlhf.config.compare import ResolvedConfig
from rlhf.config.derived import (
    base_dtype,
    compute_dtype,
    loss_scale,
    mini_batches,
    needs_critic,
    needs_old_log_probs,
    needs_reference,
    needs_reward_model,
    samples_per_step,
    sends_adapters,
)
from rlhf.config.rules.idle_settings import idle_settings
from rlhf.config.rules.learning_rules import warmup_problems
from rlhf.config.secrets import masked
from rlhf.data import PromptStream
from rlhf.errors import UserError
from rlhf.events import follow, report, subscribe
from rlhf.experience.collector import Collector
from rlhf.experience.policy_sampler import PolicySampler
from rlhf.experience.shown_samples import RolloutViewer
from rlhf.learning.actor import Actor
from rlhf.learning.credit import Advantages
from rlhf.learning.critic import Critic
from rlhf.learning.guards import Guards
from rlhf.learning.reference import Reference
from rlhf.learning.resharding import SampleResharder
from rlhf.learning.utilization import Utilization
from rlhf.loop import Components
from rlhf.models import loading
from rlhf.models.adapter_layers import add_adapters, without_adapters
from rlhf.models.config_check import check_not_quantized
from rlhf.models.flops import UpdateFlops, peak_flops
from rlhf.models.log_prob_probe import check_log_probs
from rlhf.models.model_files import on_every_rank
from rlhf.models.packing import is_packed, pack
from rlhf.models.parameter_count import short_number
from rlhf.models.weights import PendingModel
from rlhf.ranks import collectives
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.phase_clock import PhaseClock
from rlhf.ranks.progress_pipe import ProgressDisplay
from rlhf.ranks.rng import seed_everything
from rlhf.ranks.status import StatusWriter
from rlhf.ranks.stop import PreemptionFlag
from rlhf.rollout.embedded import check_lengths
from rlhf.storage.scratch import Scratch
from rlhf.storage.state import Stateful
from rlhf.tracking import Tracker
from rlhf.tracking.phases import Phases
from rlhf.tracking.run_log import RunLog

log = logging.getLogger(__name__)
AFTER_THE_STEP = ("evaluation.", "metrics.", "commit.", "memory.", "end.")
"""Prefixes of the events that come after the driver has counted the step."""


def build(
    config: Config, device: torch.device, coordinator: Coordinator, status: StatusWriter, shown: ProgressDisplay
) -> Components:
    """Build all components of this rank, and load the newest checkpoint. Collective."""
    config = settle_replicas(config, coordinator)
    setup = Setup(config, device, coordinator)
    preemption, phases = PreemptionFlag(), Phases(shown, coordinator.rank, status)
    follow(phases.report)
    with Scratch() as scratch:
        inputs = _inputs(setup, scratch.folder)
        _follow_events(inputs.driver, status, phases)
        return _build(setup, inputs, shown, preemption)


def _inputs(setup: Setup, scratch: Path) -> RunInputs:
    """Find the models and read the prompts. Raise UserError if they do not fit the run."""
    config, coordinator, device = setup.config, setup.coordinator, setup.device
    report("finding the models")
    check_backend(config.backend, device)
    seed_everything(config.trainer.seed, coordinator.rank)
    models = resolve_models(
        config.model,
        config.critic if needs_critic(config.algorithm, config.critic) else None,
        config.reward_model if needs_reward_model(config.reward) else None,
        coordinator,
        device,
        scratch,
    )
    policy = models.policy
    check_not_quantized(policy.files.source.path, getattr(policy.hf_config, "quantization_config", None))
    if config.model.lora.enabled:
        on_every_rank(lambda: policy.check_adapters(config.model.lora), coordinator)
    check_lengths(policy.hf_config, config.data.max_prompt_length, config.data.max_response_length)
    report("reading the prompts")
    trainer, data = config.trainer, config.data
    run = read_run_file(config.run_dir)
    day = date.fromisoformat(run[STARTED_ON])
    train_set, val_set = read_prompts(data, config.reward, config.env, trainer.seed, policy.tokenizer, day, coordinator)
    stream = PromptStream(
        train_set,
        trainer.seed,
        data.shuffle,
        allow_change=trainer.allow_config_change,
        held_out=val_set,
        quiet=not coordinator.is_leader,
    )
    if coordinator.is_leader:
        _warn_of_settings(config, len(train_set))
    steps_per_epoch = len(train_set) / data.train_batch_size
    steps = planned_steps(trainer, steps_per_epoch)
    if trainer.total_training_steps is None:
        _check_warmups(config, steps, len(train_set), coordinator)
    driver = DriverState(
        run["run_id"],
        steps,
        steps_per_epoch,
        trainer.total_epochs if trainer.total_training_steps is None else None,
        started_on=day.isoformat(),
    )
    return RunInputs(models, train_set, val_set, stream, driver, day)


def _warn_of_settings(config: Config, prompts: int) -> None:
    """Log settings that lose the model, have no effect or repeat prompts. `prompts`: number of training prompts."""
    if config.trainer.save_freq == 0:
        log.warning(
            "trainer.save_freq=0: no checkpoint is saved, so the trained model is lost at the end. Set "
            "trainer.save_freq=N, which also saves the last step."
        )
    for line in idle_settings(config):
        log.warning("%s", line)
    if prompts < (batch := config.data.train_batch_size):
        log.warning(
            "There are %d training prompts, fewer than data.train_batch_size=%d: each step has some prompts several "
            "times. A smaller batch avoids this.",
            prompts,
            batch,
        )


def _check_warmups(config: Config, steps: int, prompts: int, coordinator: Coordinator) -> None:
    """Raise UserError for a warm-up that is not shorter than a new run of `trainer.total_epochs`. Collective.

    A resume only logs a warning, because a resumed run normally keeps its settings.
    """
    why = f"trainer.total_epochs={config.trainer.total_epochs} with {prompts} prompts"
    problems = "\n".join(warmup_problems(config, steps, why))
    if problems and not published(config.run_dir, coordinator):
        raise UserError(problems)
    if problems and coordinator.is_leader:
        log.warning("%s", problems)


def _follow_events(driver: DriverState, status: StatusWriter, phases: Phases) -> None:
    """Pass each event, with its step, to the status file and the progress display."""

    def step_of(event: str) -> int:
        return driver.step + (not event.startswith(AFTER_THE_STEP))

    subscribe(lambda event: status.event(step_of(event), event))
    subscribe(lambda event: phases.event(step_of(event), event))


def _build(setup: Setup, inputs: RunInputs, shown: ProgressDisplay, preemption: PreemptionFlag) -> Components:
    config, coordinator, device = setup.config, setup.coordinator, setup.device
    models, driver = inputs.models, inputs.driver
    report("loading the weights")
    pool = build_pool(setup)
    reward = build_reward(setup, models, inputs.day)
    loaded = models.policy.load(loading.load_model, coordinator, device)
    engine = build_engine(setup, models.policy, loaded.model)
    learners = _learners(setup, models, loaded, driver.total_steps)
    native = sends_adapters(config.model.lora, config.rollout)
    sampler = PolicySampler(
        engine, learners.actor.backend, config.trainer.seed, native, background=config.rollout.name == "vllm_server"
    )
    tokenizer, day = models.policy.tokenizer, date.fromisoformat(str(driver.started_on))
    episodes = build_episodes(setup, pool, tokenizer, day, sampler)
    collector = build_collector(setup, inputs, sampler, reward, episodes)
    run_log = _run_log(config, driver, shown, leads=coordinator.is_leader)
    advantages = Advantages(config.algorithm, config.rollout.n)
    loss = config.actor.policy_loss.loss_mode
    own_loss = f"actor.policy_loss.loss_mode={loss}" if ".py:" in loss else None
    guards = Guards(config.guards, quiet=not coordinator.is_leader, own_loss=own_loss)
    parts = _stateful(inputs.stream, advantages, guards, run_log, learners)
    checkpointer = _checkpointer(setup, inputs, learners, parts, collector)
    report("looking for a checkpoint")
    resumed = checkpointer.resume()
    if not resumed:
        load_adapters(learners.actor.backend, config.model.lora, coordinator)
    if coordinator.is_leader:
        log.info("%s", _facts(setup, learners.actor.backend, inputs))
    run_log.start(driver.step, resumed=resumed)
    per_pass = mini_batches(config.data, config.actor)
    return Components(
        collector=collector,
        resharder=SampleResharder(per_pass, coordinator, config.trainer.seed if config.actor.shuffle else None),
        engine=engine,
        actor=learners.actor,
        critic=learners.critic,
        critic_warmup=config.trainer.critic_warmup,
        reference=learners.reference,
        advantages=advantages,
        guards=guards,
        evaluator=build_evaluator(setup, inputs.val_set, tokenizer, sampler, reward, run_log.show, episodes),
        viewer=RolloutViewer(
            collector.prompts, tokenizer, config.trainer.log_rollouts, coordinator, own_prompts=pool is None
        ),
        environments=pool,
        checkpointer=checkpointer,
        run_log=run_log,
        clock=PhaseClock(device),
        utilization=learners.utilization,
        run_dir=config.run_dir,
        driver=driver,
        reward=reward,
        needs_old_log_probs=needs_old_log_probs(config.actor, config.algorithm, per_pass),
        samples_per_step=samples_per_step(config.data, config.rollout),
        resumed=resumed,
        stop_requested=lambda: collectives.any_rank(preemption.requested or checkpointer.failed, device),
    )


def _learners(setup: Setup, models: ModelSources, policy: PendingModel, total_steps: int) -> Learners:
    """Load the models and shard them over the ranks. `policy` is the actor's model without its weights. Collective."""
    config, coordinator, device = setup.config, setup.coordinator, setup.device
    per_pass = mini_batches(config.data, config.actor)
    engines = EngineBuilder(config.model, config.backend, per_pass, config.trainer.seed, device)
    temperature, budgets = config.rollout.temperature, config.token_budgets
    reference, lora = None, config.model.lora
    compares = needs_reference(config.actor, config.algorithm)
    if lora.enabled:
        add_adapters(policy.model, lora, getattr(torch, base_dtype(lora, config.backend)))
    elif compares:
        start = models.policy.load(loading.load_model, coordinator, device)
        moves = config.ref.update_freq is not None
        model = build_frozen(start, config.backend, config.ref.fsdp_config, device, moves=moves)
        with model.on_device():
            check_log_probs(model.module, device)
        reference = Reference(model, temperature, budgets.reference, config.ref)

    dtype = getattr(torch, compute_dtype(config.backend))
    peak = peak_flops(torch.cuda.get_device_name(device), dtype) if device.type == "cuda" else None
    utilization = Utilization(None if peak is None else peak * coordinator.world_size)
    utilization.add("actor", UpdateFlops.of(policy.model), config.actor.ppo_epochs)
    scale = loss_scale(config.actor, config.data)
    actor_steps = max(1, total_steps - config.trainer.critic_warmup)
    backend = engines.build(config.actor, models.policy, policy, actor_steps)
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
        pack(model.module)  # the actor's packing probe also covers the reference: same architecture
    critic = None
    if models.critic is not None:
        start = models.critic.load(loading.load_value_model, coordinator, device)
        utilization.add("critic", UpdateFlops.of(start.model), config.critic.ppo_epochs)
        backend = engines.build(config.critic, models.critic, start, total_steps)
        critic = Critic(backend, config.critic, scale=scale, budget=budgets.critic, forward_budget=budgets.values)
    return Learners(actor, critic, reference, utilization)


def _stateful(
    stream: PromptStream, advantages: Advantages, guards: Guards, run_log: RunLog, learners: Learners
) -> dict[str, Stateful]:
    """Return the objects whose state a checkpoint saves besides weights and optimizers, by name in the checkpoint."""
    parts: dict[str, Stateful] = {"data": stream, "kl_control": advantages, "guards": guards, "history": run_log}
    if advantages.scaling.remembers:
        parts["reward_scaling"] = advantages.scaling
    if learners.actor.entropy_control.is_adaptive:
        parts["entropy_control"] = learners.actor.entropy_control
    if learners.moving_reference is not None:
        parts["reference"] = learners.moving_reference
    return parts


def _checkpointer(
    setup: Setup, inputs: RunInputs, learners: Learners, parts: Mapping[str, Stateful], collector: Collector
) -> Checkpointer:
    config, coordinator = setup.config, setup.coordinator
    resolved = ResolvedConfig.of(config)
    files = inputs.models.fingerprints | user_files(
        config.reward, config.algorithm, config.actor, config.model, config.env
    )
    return Checkpointer(
        config.run_dir,
        config.trainer,
        config.checkpoint,
        resolved,
        Identity.of_run(config.backend.name, resolved.text, files, coordinator.all_gather(torch.get_num_threads())),
        coordinator,
        RunState(learners.backends, inputs.driver, parts, learners.moving_reference, collector),
    )


def _run_log(config: Config, driver: DriverState, shown: ProgressDisplay, *, leads: bool) -> RunLog:
    tracker = None
    if leads:
        tracker = Tracker(config.trainer, config.tracking, masked(config), config.run_dir, driver.run_id)
    return RunLog(tracker, shown, driver.total_steps, log_samples=config.trainer.log_samples)


def _facts(setup: Setup, policy: TrainingBackend, inputs: RunInputs) -> str:
    """Return a line about policy, ranks, prompts and steps."""
    # `shape` is the whole tensor's shape, not this rank's, in every training engine.
    trained, base = (
        sum(math.prod(shard.shape) for shard in shards.values())
        for shards in (policy.model_shards(), policy.base_shards())
    )
    parameters = f"{short_number(base or trained)} parameters"
    if base:
        parameters += f", frozen, and {short_number(trained)} in adapters"
    where = torch.cuda.get_device_name(setup.device) if setup.device.type == "cuda" else str(setup.device)
    held_out = "" if inputs.val_set is None else f" and {inputs.val_set.count_text} held-out"
    driver = inputs.driver
    return (
        f"Policy: {inputs.models.policy.hf_config.model_type} with {parameters} on {where}, "
        f"ranks: {setup.coordinator.world_size}; {inputs.train_set.count_text} training{held_out} prompts; "
        f"step {driver.step} of {driver.total_steps} done."
    )
