"""Computes values from settings of several sections, for the trainer and the memory plan. Imports no torch."""

import math

from rlhf.config import (
    ActorConfig,
    AlgorithmConfig,
    BackendConfig,
    CriticConfig,
    DataConfig,
    FilterGroupsConfig,
    FrozenFsdpConfig,
    LoraConfig,
    RewardConfig,
    RolloutConfig,
)
from rlhf.config.algorithm_table import ESTIMATORS, Estimator
from rlhf.config.schema.reward import REWARD_MODEL


def estimator_needs(adv_estimator: str) -> Estimator:
    """Return the requirements of this advantage estimator. A user's own function has none."""
    return ESTIMATORS.get(adv_estimator, Estimator())


def trains_critic(adv_estimator: str, enable: bool | None) -> bool:
    """Return whether a critic is trained: `enable` if it is set, otherwise whether the estimator uses values."""
    return estimator_needs(adv_estimator).critic if enable is None else enable


def needs_critic(algorithm: AlgorithmConfig, critic: CriticConfig) -> bool:
    """Return `trains_critic` for these sections of the configuration."""
    return trains_critic(algorithm.adv_estimator, critic.enable)


def needs_greedy_baseline(algorithm: AlgorithmConfig) -> bool:
    """Return whether each prompt also gets a greedy response, whose reward is the estimator's baseline."""
    return estimator_needs(algorithm.adv_estimator).greedy_baseline


def needs_reference(actor: ActorConfig, algorithm: AlgorithmConfig) -> bool:
    """Return whether the run needs a reference policy: for the KL in the loss or in the reward."""
    return actor.kl_in_loss or algorithm.kl_in_reward


def needs_reward_model(reward: RewardConfig) -> bool:
    """Return whether one of the reward functions is a model."""
    return REWARD_MODEL in reward.functions


def mini_batches(data: DataConfig, actor: ActorConfig) -> int:
    """Return the mini-batches per training step: the optimizer steps of one PPO epoch over the step's batch."""
    return data.train_batch_size // actor.ppo_mini_batch_size


def needs_old_log_probs(actor: ActorConfig, algorithm: AlgorithmConfig, mini_batches: int) -> bool:
    """Return whether the actor computes old log-probs in a separate forward pass before the update.

    With one optimizer step per batch, the update's own forward pass computes the same log-probs, because the policy has
    not changed yet. A rejection (`rollout_rs`) and the KL in the reward always need old log-probs before the update.
    """
    several_updates = actor.ppo_epochs * mini_batches > 1
    return several_updates or algorithm.rollout_correction.rollout_rs is not None or algorithm.kl_in_reward


def longest_sample(data: DataConfig) -> int:
    """Return the largest number of tokens of a sample: the longest prompt plus the longest response."""
    return data.max_prompt_length + data.max_response_length


def loss_scale(actor: ActorConfig, data: DataConfig) -> int:
    """Return the number of tokens that the loss mode `seq-mean-token-sum-norm` divides by."""
    return actor.loss_scale_factor or data.max_response_length


def samples_per_step(data: DataConfig, rollout: RolloutConfig) -> int:
    """Return the number of samples that all ranks together train on in a step."""
    return data.train_batch_size * rollout.n


def prompts_per_generation(data: DataConfig, filter_groups: FilterGroupsConfig) -> int:
    """Return the prompts per generation over all ranks. With dynamic sampling, a step may need several generations."""
    return (data.gen_batch_size if filter_groups.enable else None) or data.train_batch_size


def staleness_bound(async_steps: int, max_staleness: int | None) -> int:
    """Return the largest age of a token in steps: `max_staleness`, or its default if it is null."""
    return max(1, async_steps) if max_staleness is None else max_staleness


def generated_by_rank(prompts: int, rollout: RolloutConfig, algorithm: AlgorithmConfig, ranks: int) -> int:
    """Return the number of samples that the busiest rank generates. All samples of a prompt come from one rank.

    Args:
        prompts: number of prompts of one generation, over all `ranks` ranks.
    """
    return math.ceil(prompts / ranks) * (rollout.n + needs_greedy_baseline(algorithm))


def compute_dtype(backend: BackendConfig) -> str:
    """Return the name of the dtype in which the forward and backward passes compute."""
    return "bfloat16" if backend.autocast == "bfloat16" else "float32"


def base_dtype(lora: LoraConfig, backend: BackendConfig) -> str:
    """Return the name of the frozen base weights' dtype: `model.lora.base_dtype`, or the compute dtype if null."""
    return lora.base_dtype or compute_dtype(backend)


def frozen_dtype(kept: FrozenFsdpConfig, backend: BackendConfig, *, moves: bool = False) -> str:
    """Return the name of the dtype in which a model that is not trained stores its weights.

    `moves`: whether the model is a reference that `ref.update_freq` updates; bfloat16 would round away the small
    updates.
    """
    return kept.model_dtype or ("float32" if moves else compute_dtype(backend))


def sends_adapters(lora: LoraConfig, rollout: RolloutConfig) -> bool:
    """Return whether a weight sync sends the adapters alone instead of all weights."""
    return lora.enabled and rollout.lora == "native"
