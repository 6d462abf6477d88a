"""Builds the reward, the rollout engine, the collector and the evaluator."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import lru_cache, partial
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf.assemble.inputs import RunInputs
from rlhf.assemble.learners import build_frozen
from rlhf.assemble.model_sources import ModelSources, ResolvedModel
from rlhf.assemble.trajectory_hash import trajectory_hash
from rlhf.checkpoint.state.run_file import read_run_file
from rlhf.config import Config, DataConfig, RolloutConfig, ValKwargsConfig
from rlhf.config.compare import trajectory
from rlhf.config.derived import longest_sample, needs_greedy_baseline, sends_adapters, staleness_bound
from rlhf.config.user_functions import hash_of_files
from rlhf.data import PromptSet
from rlhf.data.turns.chat_turns import ChatTurns, env_template
from rlhf.environments.sessions import EnvironmentPool
from rlhf.experience.collector import Collector
from rlhf.experience.episode import EnvironmentClass
from rlhf.experience.episodes import Episodes
from rlhf.experience.evaluation import Evaluator
from rlhf.experience.generation import Generation
from rlhf.experience.journal import Journal
from rlhf.experience.policy_sampler import PolicySampler
from rlhf.experience.prompt_share import PromptShare
from rlhf.models import loading
from rlhf.models.flops import sliding_windows
from rlhf.models.fused_experts import FileConversions, parts_in_files
from rlhf.models.packing_probe import choose_packing
from rlhf.planning.check import engine_share
from rlhf.ranks import dims
from rlhf.ranks.coordinator import Coordinator
from rlhf.reward import Reward, answer_reader
from rlhf.reward import build_reward as reward_of
from rlhf.reward.reward_model import RewardModel
from rlhf.rollout import RolloutEngine, SamplingParams
from rlhf.rollout.embedded import build_embedded_engine, eos_token_ids
from rlhf.rollout.policy_files import PolicyFiles
from rlhf.tracking.sample_files import ShownSample


@dataclass(frozen=True)
class Setup:
    """Arguments that all components of a rank need."""

    config: Config
    device: torch.device
    coordinator: Coordinator


def build_reward(setup: Setup, models: ModelSources, day: date) -> Reward:
    """Build the reward functions, and shard a reward model over the ranks. Collective.

    `day`: the date that the reward model's chat template prints.
    """
    config, device, found = setup.config, setup.device, models.reward_model
    if found is None:
        return reward_of(config.reward)
    loaded = found.load(loading.load_reward_model, setup.coordinator, device)
    model = build_frozen(loaded, config.backend, config.reward_model.fsdp_config, device)
    with model.on_device():
        choose_packing(model.module, config.reward_model.use_remove_padding, "reward_model.use_remove_padding")
    module: Any = model.module
    scorer = RewardModel(module, found.tokenizer, config.reward_model, device, day, model.on_device)
    return reward_of(config.reward, scorer)


def build_engine(setup: Setup, policy: ResolvedModel, model: PreTrainedModel, *, trains: bool = True) -> RolloutEngine:
    """Build the rollout engine `rollout.name`, for a policy with the architecture of `model`. Collective.

    With `trains=False`, vLLM gets the memory that an evaluation leaves free.
    """
    config, coordinator, device = setup.config, setup.coordinator, setup.device
    if config.rollout.name == "embedded":
        return build_embedded_engine(model, policy.tokenizer, config.rollout, device)
    # The engine builds the model from these files, and receives the weights in the first weight sync.
    generation: Any = getattr(model, "generation_config", None)
    files = PolicyFiles(
        loading.hf_files(model.config, policy.tokenizer, generation),
        config.run_dir / "rollout_model",
        eos_token_ids(model, policy.tokenizer),
        longest_sample(config.data),
        policy.tokenizer,
    )
    lora = config.model.lora
    if config.rollout.name == "vllm":
        from rlhf.rollout.vllm.engine_start import build_vllm_engine
        from rlhf.rollout.vllm.native_adapters import build_adapter_engine

        seed = config.trainer.seed
        rollout = replace(config.rollout, gpu_memory_utilization=engine_share(config, trains=trains))
        if sends_adapters(lora, rollout):
            return build_adapter_engine(lora, rollout, files, coordinator, device, seed=seed)
        return build_vllm_engine(rollout, files, coordinator, device, seed=seed)
    from rlhf.rollout.servers.adapter_engine import build_adapter_server_engine
    from rlhf.rollout.servers.server_engine import build_server_engine

    build = build_server_engine
    if sends_adapters(lora, config.rollout):
        build = partial(build_adapter_server_engine, lora)
    logs = config.run_dir / "rollout_servers"
    shapes = {name: weight.shape for name, weight in model.named_parameters()}
    parts = parts_in_files(shapes, FileConversions.of(model))
    run_id = read_run_file(config.run_dir)["run_id"]
    return build(config.rollout, files, coordinator, device, logs=logs, run_id=run_id, parts=parts)


def build_pool(setup: Setup) -> EnvironmentPool | None:
    """Start the host of the environments, if there are any. Raise UserError for a class that is not an environment."""
    return EnvironmentPool(setup.config.env).start() if setup.config.env.used else None


def build_episodes(
    setup: Setup,
    pool: EnvironmentPool | None,
    tokenizer: PreTrainedTokenizerBase,
    day: date,
    sampler: PolicySampler,
) -> Episodes | None:
    """Build the player of episodes, if there are environments. Raise UserError if the chat template does not fit."""
    if pool is None:
        return None
    env, data = setup.config.env, setup.config.data
    template = None if env.template is None else env_template(env.template)

    @lru_cache(64)  # an agent's tools may differ from row to row
    def chat_of(tools: str) -> ChatTurns:
        variables, announce = data.apply_chat_template_kwargs, env.announce_tools
        return ChatTurns(tokenizer, json.loads(tools), template, variables, day, announce=announce)

    def of(tools: Sequence[dict[str, Any]]) -> ChatTurns:
        return chat_of(json.dumps(tools))

    must_reward = not setup.config.reward.functions
    classes = [EnvironmentClass(i, each, of, must_reward) for i, each in enumerate(pool.definitions)]
    for each in pool.definitions:
        of(each.tools)  # raises UserError before the training
    seed, limit = setup.config.trainer.seed, data.max_prompt_length
    return Episodes(env, classes, pool, sampler, setup.coordinator, seed, limit, tokenizer)


def build_collector(
    setup: Setup, inputs: RunInputs, sampler: PolicySampler, reward: Reward, episodes: Episodes | None
) -> Collector:
    """Build the collector of each step's batch, with a journal if `checkpoint.journal` is set."""
    config, driver = setup.config, inputs.driver
    prompts = PromptShare(inputs.stream, config.data.train_batch_size, dims.data())
    journal = None
    if config.checkpoint.journal:
        steps_hash = trajectory_hash(
            trajectory(config), config.checkpoint, config.model.lora, driver.run_id, inputs.fingerprints
        )
        journal = Journal(config.run_dir, steps_hash, hash_of_files(config.reward.functions), setup.coordinator)
    generation = Generation(
        sampler,
        sampling_params(config.rollout, config.rollout, config.data, ignore_eos=config.rollout.ignore_eos),
        config.rollout.n,
        needs_greedy_baseline(config.algorithm),
        reward,
        config.reward.overlong_buffer,
        inputs.models.policy.tokenizer,
        setup.coordinator,
        config.data.train_batch_size,
        journal,
        episodes,
    )
    trained = [model.hf_config for model in (inputs.models.policy, inputs.models.critic) if model is not None]
    return Collector(
        config.data,
        config.algorithm.filter_groups,
        config.reward,
        config.rollout.async_steps,
        staleness_bound(config.rollout.async_steps, config.rollout.max_staleness),
        prompts,
        generation,
        setup.device,
        ends_with=driver.ends_with,
        windows=frozenset(window for config in trained for window in sliding_windows(config) if window is not None),
    )


def build_evaluator(
    setup: Setup,
    val_set: PromptSet | None,
    tokenizer: PreTrainedTokenizerBase,
    sampler: PolicySampler,
    reward: Reward,
    show: Callable[[list[ShownSample]], None],
    episodes: Episodes | None = None,
) -> Evaluator:
    """Build the evaluator on the held-out prompts, which passes its samples to `show`."""
    config = setup.config
    return Evaluator(
        val_set,
        sampler,
        sampling_params(config.rollout.val_kwargs, config.rollout, config.data),
        config.rollout.val_kwargs.n,
        reward,
        answer_reader(config.reward),
        tokenizer,
        setup.coordinator,
        config.trainer,
        show,
        episodes,
    )


def sampling_params(
    section: RolloutConfig | ValKwargsConfig, rollout: RolloutConfig, data: DataConfig, *, ignore_eos: bool = False
) -> SamplingParams:
    """Return the sampling parameters of `section`: of training samples or of evaluations."""
    return SamplingParams(
        section.temperature,
        section.top_p,
        section.top_k,
        data.max_response_length,
        tuple(rollout.stop),
        ignore_eos,
        section.min_p,
        section.repetition_penalty,
        isinstance(section, RolloutConfig) and section.sampling_mask,  # nobody trains on evaluations
    )
