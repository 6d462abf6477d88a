"""Builds the components of a rank that evaluates a policy: its weights and an engine, but nothing to train with."""

import logging
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlhf.assemble.inputs import read_held_out_prompts
from rlhf.assemble.learners import init_adapters, load_adapters
from rlhf.assemble.model_sources import ModelSources, ResolvedModel, resolve_models
from rlhf.assemble.rollouts import Setup, build_engine, build_episodes, build_evaluator, build_pool, build_reward
from rlhf.backends.fsdp2 import Fsdp2Policy
from rlhf.checkpoint.load.locations import FileLocations
from rlhf.checkpoint.load.restoring import load_state
from rlhf.checkpoint.load.resume import from_source
from rlhf.checkpoint.start.run_dir import resume_source
from rlhf.checkpoint.state.driver_state import DriverState
from rlhf.checkpoint.state.run_file import STARTED_ON, read_run_file
from rlhf.checkpoint.state.run_state import RunState
from rlhf.config import Config
from rlhf.config.derived import base_dtype, needs_reward_model, sends_adapters
from rlhf.config.secrets import masked
from rlhf.environments.sessions import EnvironmentPool
from rlhf.errors import UserError
from rlhf.events import announce, follow, report, subscribe
from rlhf.experience.evaluation import Evaluator
from rlhf.experience.policy_sampler import PolicySampler
from rlhf.models import loading
from rlhf.models.adapter_layers import add_adapters
from rlhf.models.config_check import check_not_quantized
from rlhf.models.model_files import on_every_rank
from rlhf.models.weights import PendingModel
from rlhf.ranks.coordinator import Coordinator
from rlhf.ranks.progress_pipe import ProgressDisplay
from rlhf.ranks.rng import seed_everything
from rlhf.ranks.status import StatusWriter
from rlhf.reward import Reward
from rlhf.rollout import RolloutEngine
from rlhf.rollout.embedded import check_lengths
from rlhf.storage.scratch import Scratch
from rlhf.tracking import Tracker
from rlhf.tracking.phases import Phases
from rlhf.tracking.run_log import RunLog

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Evaluation:
    """The components of a rank that evaluates the policy after `step` training steps."""

    evaluator: Evaluator
    reward: Reward
    environments: EnvironmentPool | None
    engine: RolloutEngine
    run_log: RunLog
    step: int

    def run(self) -> None:
        """Evaluate the policy, and record metrics and samples as a run records an evaluation. Collective."""
        self.run_log.start(self.step, resumed=False)
        self.run_log.step(self.step, self.evaluator.evaluate(self.step))
        announce("end.before")


def build_evaluation(
    config: Config, device: torch.device, coordinator: Coordinator, status: StatusWriter, shown: ProgressDisplay
) -> Evaluation:
    """Build all components, and load the weights of `trainer.resume_from_path`, or else of `model.path`. Collective."""
    phases = Phases(shown, coordinator.rank, status)
    follow(phases.report)
    # Report no step: the supervisor then ends the ranks at once after a stop request, because there is nothing to save.
    subscribe(lambda event: status.event(None, event))
    setup = Setup(config, device, coordinator)
    with Scratch() as scratch:
        models = _models(setup, scratch.folder)
        report("reading the prompts")
        run, data = read_run_file(config.run_dir), config.data
        tokenizer = models.policy.tokenizer
        day = date.fromisoformat(run[STARTED_ON])
        seed = config.trainer.seed
        val_set = read_held_out_prompts(data, config.reward, config.env, seed, tokenizer, day, coordinator)
        report("loading the weights")
        pool = build_pool(setup)
        reward = build_reward(setup, models, day)
        loaded = models.policy.load(loading.load_model, coordinator, device)
        engine = build_engine(setup, models.policy, loaded.model, trains=False)
        policy = _policy(setup, loaded)
        driver = DriverState(run["run_id"], 0, 0.0)
        if (source := resume_source(config.trainer)) is None:
            load_adapters(policy, config.model.lora, coordinator)
        else:
            from_source(source, coordinator, partial(_restore, setup, models.policy, policy, driver))
    subscribe(lambda event: phases.event(driver.step, event))
    tracker = None
    if coordinator.is_leader:
        tracker = Tracker(config.trainer, config.tracking, masked(config), config.run_dir, driver.run_id)
    run_log = RunLog(tracker, shown, max(1, driver.step), log_samples=config.trainer.log_samples)
    native = sends_adapters(config.model.lora, config.rollout)
    sampler = PolicySampler(engine, policy, config.trainer.seed, native)
    episodes = build_episodes(setup, pool, tokenizer, day, sampler)
    evaluator = build_evaluator(setup, val_set, tokenizer, sampler, reward, run_log.show, episodes)
    return Evaluation(evaluator, reward, pool, engine, run_log, driver.step)


def _models(setup: Setup, scratch: Path) -> ModelSources:
    """Find the policy and the reward model, if any. Raise UserError if they do not fit the settings."""
    config, coordinator = setup.config, setup.coordinator
    report("finding the models")
    seed_everything(config.trainer.seed, coordinator.rank)
    judge = config.reward_model if needs_reward_model(config.reward) else None
    models = resolve_models(config.model, None, judge, coordinator, setup.device, scratch)
    policy = models.policy
    check_not_quantized(policy.files.source.path, getattr(policy.hf_config, "quantization_config", None))
    if config.model.lora.enabled:
        on_every_rank(lambda: policy.check_adapters(config.model.lora), coordinator)
    check_lengths(policy.hf_config, config.data.max_prompt_length, config.data.max_response_length)
    return models


def _policy(setup: Setup, loaded: PendingModel) -> Fsdp2Policy:
    """Shard the model over the ranks, add new adapters if `model.lora.enabled`, and load the model's weights."""
    config, device, lora = setup.config, setup.device, setup.config.model.lora
    if lora.enabled:
        add_adapters(loaded.model, lora, getattr(torch, base_dtype(lora, config.backend)))
    frozen = loaded.model.requires_grad_(False).eval()
    # Keep the weights in host memory: only weight syncs read them, and the engine needs the device's memory.
    policy = Fsdp2Policy(frozen, config.backend, device, param_offload=device.type == "cuda")
    loaded.fill(policy.base_shards() or policy.model_shards())
    if lora.enabled:
        init_adapters(policy, lora, config.trainer.seed)
    return policy


def _restore(
    setup: Setup, found: ResolvedModel, policy: Fsdp2Policy, driver: DriverState, located: FileLocations
) -> None:
    """Load weights and step from a checkpoint.

    Raise UserError if `model.path` has changed since the save, or if the checkpoint has no weights.
    """
    manifest, source = located.manifest, found.files.source
    if manifest.fingerprints.get("model.path") not in (None, found.files.fingerprint):
        raise UserError(
            f"model.path={source.path} holds other files than when {located.path} was saved. Restore the files, or set "
            "model.path to a folder with a copy of the earlier files."
        )
    contents = ["model"] if "model" in manifest.contents else ["hf_model"]
    if contents[0] not in manifest.contents:
        raise UserError(
            f"{located.path} has no weights (checkpoint.contents={manifest.contents}). Name another checkpoint."
        )
    actor: Any = policy  # `policy` has the methods of `TrainState` that a load of weights calls
    load_state(located, RunState({"actor": actor}, driver), contents, setup.config.trainer.seed, setup.coordinator)
