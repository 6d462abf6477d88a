"""Every component of one rank, from the resolved configuration: data and settings are checked before weights load."""

import logging
import math
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from rlhf.assemble.course import user_files
from rlhf.assemble.found_models import find_models
from rlhf.assemble.learners import Learners, build_learners, read_adapters
from rlhf.assemble.rollouts import build_collector, build_engine, build_reward, evaluation_params
from rlhf.backends import check_backend
from rlhf.backends.base import TrainingBackend
from rlhf.checkpoint.checkpointer import Checkpointer
from rlhf.checkpoint.commit.identity import Identity
from rlhf.checkpoint.start.run_dir import planned_steps
from rlhf.checkpoint.state.driver_state import DriverState
from rlhf.checkpoint.state.run_file import read_run_file
from rlhf.checkpoint.state.run_state import RunState
from rlhf.config import Config
from rlhf.config.compare import ResolvedConfig
from rlhf.config.derived import mini_batches, needs_old_log_probs, samples_per_step, sends_adapters
from rlhf.data import PromptSet, PromptStream, build_train_set, build_val_set
from rlhf.errors import UserError
from rlhf.events import follow, report, subscribe
from rlhf.experience.collector import Collector
from rlhf.experience.evaluation import Evaluator
from rlhf.experience.policy_sampler import PolicySampler
from rlhf.experience.shown_samples import RolloutViewer
from rlhf.learning.credit import Advantages
from rlhf.learning.guards import Guards
from rlhf.learning.work_sharing import WorkSharing
from rlhf.loop import Components
from rlhf.models import loading
from rlhf.models.config_check import check_not_quantised
from rlhf.models.model_files import on_every_rank
from rlhf.models.parameter_count import in_words
from rlhf.ranks import collectives
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.phase_clock import PhaseClock
from rlhf.ranks.progress_pipe import ShowsProgress
from rlhf.ranks.rng import seed_everything
from rlhf.ranks.status import StatusWriter
from rlhf.ranks.stop import PreemptionFlag
from rlhf.reward import answer_reader
from rlhf.rollout import check_lengths
from rlhf.storage.scratch import Scratch
from rlhf.storage.state import Stateful
from rlhf.tracking import Tracker
from rlhf.tracking.phases import Phases
from rlhf.tracking.run_log import RunLog

log = logging.getLogger(__name__)
AFTER_THE_STEP = ("evaluation.", "metrics.", "commit.", "end.")
"""Events once the driver has counted the step done."""


def build(
    config: Config, device: torch.device, coordinator: Coordinator, status: StatusWriter, shown: ShowsProgress
) -> Components:
    """Every component of this rank, brought to the newest checkpoint; people see its progress through `shown`.
    Collective."""
    phases = Phases(shown, coordinator.rank)
    follow(phases.report)
    with Scratch() as scratch:
        return _build(config, device, coordinator, status, shown, phases, scratch.folder)


def _build(
    config: Config,
    device: torch.device,
    coordinator: Coordinator,
    status: StatusWriter,
    shown: ShowsProgress,
    phases: Phases,
    scratch: Path,
) -> Components:
    report("finding the models")
    check_backend(config.backend, device)
    seed_everything(config.trainer.seed, coordinator.rank)
    preemption = PreemptionFlag()

    # Whatever a user can have mistaken comes before the first weights.
    models = find_models(config, coordinator, device, scratch)
    policy = models.policy
    check_not_quantised(policy.files.source.path, getattr(policy.hf_config, "quantization_config", None))
    if config.model.lora.enabled:
        on_every_rank(lambda: policy.check_adapters(config.model.lora), coordinator)
    check_lengths(policy.hf_config, config.data.max_prompt_length, config.data.max_response_length)
    report("reading the prompts")
    train_set, val_set = _prompt_sets(config, policy.tokenizer, coordinator)
    stream = PromptStream(
        train_set, config.trainer.seed, config.data.shuffle, allow_change=config.trainer.allow_config_change
    )
    driver = _driver(config, len(train_set))

    def step_of(event: str) -> int:
        return driver.step + (not event.startswith(AFTER_THE_STEP))

    subscribe(lambda event: status.event(step_of(event), event))
    subscribe(lambda event: phases.event(step_of(event), event))
    report("loading the weights")
    reward = build_reward(config, models, coordinator, device)
    loaded = policy.load(loading.load_model, coordinator, device)
    engine = build_engine(config, policy, loaded.model, coordinator, device)
    learners = build_learners(config, models, loaded, driver.total_steps, coordinator, device)
    native = sends_adapters(config.model.lora, config.rollout)
    sampler = PolicySampler(engine, learners.actor.backend, config.trainer.seed, native)

    fingerprints = models.fingerprints | {"prompts": train_set.fingerprint}
    collector = build_collector(config, stream, sampler, reward, policy, driver, fingerprints, coordinator, device)
    val_params = evaluation_params(config.rollout, config.data)
    run_log = _run_log(config, driver, shown, leads=coordinator.is_leader)
    evaluator = Evaluator(
        val_set,
        sampler,
        val_params,
        config.rollout.val_kwargs.n,
        reward,
        answer_reader(config.reward),
        policy.tokenizer,
        coordinator,
        config.trainer,
        run_log.show,
    )
    advantages = Advantages(config.algorithm, config.rollout.n)
    guards = Guards(config.guards, quiet=not coordinator.is_leader)

    parts: dict[str, Stateful] = {"data": stream, "kl_control": advantages, "guards": guards, "history": run_log}
    if advantages.scaling.remembers:
        parts["reward_scaling"] = advantages.scaling
    if learners.actor.entropy_control.moves:
        parts["entropy_control"] = learners.actor.entropy_control
    files = models.fingerprints | user_files(config)
    checkpointer = _checkpointer(config, coordinator, learners, driver, parts, files, collector)
    report("looking for a checkpoint")
    resumed = checkpointer.resume()
    if not resumed:
        read_adapters(learners.actor.backend, config.model.lora, coordinator)
    if coordinator.is_leader:
        actor, kind = learners.actor.backend, policy.hf_config.model_type
        log.info("%s", _facts(actor, kind, train_set, val_set, driver, coordinator, device))
    run_log.start(driver.step, resumed=resumed)
    per_pass = mini_batches(config.data, config.actor)
    return Components(
        collector=collector,
        work_sharing=WorkSharing(
            per_pass,
            coordinator,
            config.trainer.seed if config.actor.shuffle else None,
        ),
        engine=engine,
        actor=learners.actor,
        critic=learners.critic,
        critic_warmup=config.trainer.critic_warmup,
        reference=learners.reference,
        advantages=advantages,
        guards=guards,
        evaluator=evaluator,
        viewer=RolloutViewer(collector.prompts, policy.tokenizer, config.trainer.log_rollouts, coordinator),
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


def _prompt_sets(
    config: Config, tokenizer: PreTrainedTokenizerBase, coordinator: Coordinator
) -> tuple[PromptSet, PromptSet | None]:
    data, reward, seed = config.data, config.reward, config.trainer.seed
    train_set = build_train_set(data, reward, seed, tokenizer)
    val_set = build_val_set(data, reward, seed, tokenizer)
    if len(set(coordinator.gather(train_set.fingerprint))) > 1:
        raise UserError(
            f"The ranks read different training prompts from {data.train_files or data.reasoning_gym}: give every node "
            "the same files, and set PYTHONHASHSEED=0 for all ranks (some reasoning-gym tasks depend on it; our own "
            "supervisor sets it)."
        )
    return train_set, val_set


def _driver(config: Config, prompts: int) -> DriverState:
    steps_per_epoch = prompts / config.data.train_batch_size
    run_id = read_run_file(config.run_dir)["run_id"]
    by_epochs = config.trainer.total_training_steps is None
    return DriverState(
        run_id,
        planned_steps(config.trainer, steps_per_epoch),
        steps_per_epoch,
        config.trainer.total_epochs if by_epochs else None,
    )


def _checkpointer(
    config: Config,
    coordinator: Coordinator,
    learners: Learners,
    driver: DriverState,
    parts: dict[str, Stateful],
    fingerprints: dict[str, str],
    collector: Collector,
) -> Checkpointer:
    reference = learners.reference
    moving = reference if reference is not None and reference.moves else None
    if moving is not None:
        parts = parts | {"reference": moving}
    resolved = ResolvedConfig.of(config)
    return Checkpointer(
        config.run_dir,
        config.trainer,
        config.checkpoint,
        resolved,
        Identity.of_run(config.backend.name, resolved.text, fingerprints, coordinator.gather(torch.get_num_threads())),
        coordinator,
        RunState(learners.backends, driver, parts, moving, collector),
    )


def _run_log(config: Config, driver: DriverState, shown: ShowsProgress, *, leads: bool) -> RunLog:
    tracker = None
    if leads:
        tracker = Tracker(config.trainer, config.tracking, asdict(config), config.run_dir, driver.run_id)
    return RunLog(tracker, shown, driver.total_steps, log_samples=config.trainer.log_samples)


def _facts(
    policy: TrainingBackend,
    model_type: str,
    train_set: PromptSet,
    val_set: PromptSet | None,
    driver: DriverState,
    coordinator: Coordinator,
    device: torch.device,
) -> str:
    """What is known of the run only now, in a line."""
    # Of the shards, which have the whole shapes in every engine.
    trained, base = (
        sum(math.prod(shard.shape) for shard in shards.values())
        for shards in (policy.model_shards(), policy.base_shards())
    )
    parameters = f"{in_words(base or trained)} parameters"
    if base:
        parameters += f", frozen, and {in_words(trained)} in adapters"
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    held_out = "" if val_set is None else f" and {val_set.counted} held-out"
    return (
        f"Policy: {model_type} with {parameters} on {where}, ranks: {coordinator.world_size}; "
        f"{train_set.counted} training{held_out} prompts; step {driver.step} of {driver.total_steps} done."
    )
