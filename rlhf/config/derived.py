"""Facts that follow from settings of several sections, each stated once for the trainer and the memory plan.

The trainer acts on them, and the plan counts with them. Imports no torch.
"""

import math

from rlhf.config import (
    ActorConfig,
    AlgorithmConfig,
    BackendConfig,
    CriticConfig,
    DataConfig,
    FilterGroupsConfig,
    LoraConfig,
    RewardConfig,
    RolloutConfig,
)
from rlhf.config.algorithm_table import ESTIMATORS, Estimator
from rlhf.config.schema.reward import REWARD_MODEL


def estimator_needs(adv_estimator: str) -> Estimator:
    """Needs of an estimator by its name; a function of the user's has none."""
    return ESTIMATORS.get(adv_estimator, Estimator())


def trains_critic(adv_estimator: str, enable: bool | None) -> bool:
    """Whether a critic is trained: as `critic.enable` says, or where that is null, when the estimator uses values."""
    return estimator_needs(adv_estimator).critic if enable is None else enable


def needs_critic(algorithm: AlgorithmConfig, critic: CriticConfig) -> bool:
    """`trains_critic` of a configuration's sections."""
    return trains_critic(algorithm.adv_estimator, critic.enable)


def needs_greedy_baseline(algorithm: AlgorithmConfig) -> bool:
    """Whether each prompt also gets a greedy response, whose reward is the estimator's baseline."""
    return estimator_needs(algorithm.adv_estimator).greedy_baseline


def needs_reference(actor: ActorConfig, algorithm: AlgorithmConfig) -> bool:
    """Whether any KL compares the policy with the reference."""
    return actor.kl_in_loss or algorithm.kl_in_reward


def needs_reward_model(reward: RewardConfig) -> bool:
    """Whether one of the reward functions is a model."""
    return REWARD_MODEL in reward.functions


def mini_batches(data: DataConfig, actor: ActorConfig) -> int:
    """Optimizer steps per pass over the batch of a training step."""
    return data.train_batch_size // actor.ppo_mini_batch_size


def needs_old_log_probs(actor: ActorConfig, algorithm: AlgorithmConfig, mini_batches: int) -> bool:
    """Whether the actor computes the log-probs of a step's samples before it is updated.

    With one optimizer step per batch the pass of the update itself sees the policy that the old log-probs are of. But a
    rejection (`rollout_rs`) and the KL in the reward need them before that.
    """
    several_updates = actor.ppo_epochs * mini_batches > 1
    return several_updates or algorithm.rollout_correction.rollout_rs is not None or algorithm.kl_in_reward


def longest_sample(data: DataConfig) -> int:
    """Tokens of the longest prompt with the longest response."""
    return data.max_prompt_length + data.max_response_length


def loss_scale(actor: ActorConfig, data: DataConfig) -> int:
    """The length that the loss mode `seq-mean-token-sum-norm` divides by."""
    return actor.loss_scale_factor or data.max_response_length


def samples_per_step(data: DataConfig, rollout: RolloutConfig) -> int:
    """Samples that all ranks train on in a step."""
    return data.train_batch_size * rollout.n


def prompts_per_generation(data: DataConfig, filter_groups: FilterGroupsConfig) -> int:
    """Prompts whose samples all ranks generate at once: of a step, or of one round of dynamic sampling."""
    return (data.gen_batch_size if filter_groups.enable else None) or data.train_batch_size


def generated_by_rank(prompts: int, rollout: RolloutConfig, algorithm: AlgorithmConfig, ranks: int) -> int:
    """Samples of `prompts` that the busiest of `ranks` generates: a prompt's samples all come from one rank."""
    return math.ceil(prompts / ranks) * (rollout.n + needs_greedy_baseline(algorithm))


def compute_dtype(backend: BackendConfig) -> str:
    """Precision of the forward and backward passes."""
    return "bfloat16" if backend.autocast == "bfloat16" else "float32"


def base_dtype(lora: LoraConfig, backend: BackendConfig) -> str:
    """Precision of the frozen weights beside adapters, `model.lora.base_dtype` or what its null means."""
    return lora.base_dtype or compute_dtype(backend)


def sends_adapters(lora: LoraConfig, rollout: RolloutConfig) -> bool:
    """Whether the engine receives the adapters alone, instead of whole weights."""
    return lora.enabled and rollout.lora == "native"
