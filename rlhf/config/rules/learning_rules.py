"""Checks optimizers, schedules, losses and the KL to the reference."""

from collections.abc import Iterator

from rlhf.config import Config
from rlhf.config.derived import mini_batches
from rlhf.config.rules.without_effect import without_effect


def optimizer_problems(config: Config) -> Iterator[str]:
    """Yield one line per warm-up that is not shorter than the run, invalid beta, or decay without effect."""
    for key, role in (("actor", config.actor), ("critic", config.critic)):
        optim = role.optim
        if len(optim.betas) != 2 or not all(0 <= b < 1 for b in optim.betas):
            yield f"{key}.optim.betas={optim.betas}: must be two numbers, each at least 0 and less than 1."
        if optim.weight_decay == 0:
            yield from without_effect(config, [f"{key}.optim.decay_norm_and_bias"], f"{key}.optim.weight_decay above 0")
    if (steps := config.trainer.total_training_steps) is not None:
        yield from warmup_problems(config, steps, f"trainer.total_training_steps={steps}")


def warmup_problems(config: Config, steps: int, why: str) -> Iterator[str]:
    """Yield one line per warm-up that is not shorter than a run of `steps` steps. `why` names the setting of `steps`.

    A run whose length comes from `trainer.total_epochs` calls this after it has read its prompts.
    """
    warmup, per_pass = config.trainer.critic_warmup, max(mini_batches(config.data, config.actor), 1)
    if warmup >= steps:
        yield (
            f"trainer.critic_warmup={warmup}: the run has {steps} steps ({why}), so the policy would never train; set "
            f"trainer.critic_warmup to less than {steps}."
        )
    for key, role, idle in (("actor", config.actor, warmup), ("critic", config.critic, 0)):
        optim = role.optim
        if steps <= idle:
            continue
        by_updates = optim.lr_scheduler_interval == "optimizer_step"
        scheduled = (steps - idle) * (role.ppo_epochs * per_pass if by_updates else 1)
        if optim.lr_warmup_steps >= scheduled:
            unit = optim.lr_scheduler_interval.replace("_", " ")
            yield (
                f"{key}.optim.lr_warmup_steps={optim.lr_warmup_steps}: the run has {scheduled} {unit}s "
                f"({why}); set {key}.optim.lr_warmup_steps to less than {scheduled}."
            )


def loss_problems(config: Config) -> Iterator[str]:
    """Yield one line per contradiction between settings of the losses and the over-long penalty."""
    actor, buffer, longest = config.actor, config.reward.overlong_buffer, config.data.max_response_length
    if actor.shuffle and actor.ppo_mini_batch_size == config.data.train_batch_size:
        yield (
            "actor.shuffle=true: has no effect, because a step has a single mini-batch (actor.ppo_mini_batch_size="
            f"{actor.ppo_mini_batch_size}); set actor.shuffle=false, or a smaller actor.ppo_mini_batch_size."
        )
    if actor.clip_ratio_low > 1:
        yield (
            f"actor.clip_ratio_low={actor.clip_ratio_low}: must be at most 1, because the ratio is clipped at 1 - "
            "clip_ratio_low, and a ratio is never below 0."
        )
    policy_loss = actor.policy_loss
    if policy_loss.loss_mode == "clip_cov" and policy_loss.clip_cov_lb >= policy_loss.clip_cov_ub:
        yield (
            f"actor.policy_loss.clip_cov_lb={policy_loss.clip_cov_lb}: must be less than "
            f"actor.policy_loss.clip_cov_ub={policy_loss.clip_cov_ub}, or no token is between them."
        )
    norm = "seq-mean-token-sum-norm"
    if norm not in (actor.loss_agg_mode, config.critic.loss_agg_mode):
        needs = f"actor.loss_agg_mode={norm} or critic.loss_agg_mode={norm}"
        yield from without_effect(config, ["actor.loss_scale_factor"], needs, remedy=f"actor.loss_agg_mode={norm}")
    if buffer.enable and buffer.len >= longest:
        yield (
            f"reward.overlong_buffer.len={buffer.len}: must be less than data.max_response_length={longest}; "
            f"set reward.overlong_buffer.len={max(longest // 5, 1)}, or reward.overlong_buffer.enable=false."
        )


def kl_problems(config: Config) -> Iterator[str]:
    control, actor = config.algorithm.kl_ctrl, config.actor
    if not actor.kl_in_loss:
        remedy = "actor.use_kl_loss=true and actor.kl_loss_coef above 0"
        yield from without_effect(config, ["actor.use_bias_correction_kl"], "a KL in the loss", remedy=remedy)
    if control.type != "adaptive":
        return
    if not config.algorithm.use_kl_in_reward:
        yield from without_effect(config, ["algorithm.kl_ctrl.type"], "algorithm.use_kl_in_reward=true")
    elif control.kl_coef == 0:
        yield (
            "algorithm.kl_ctrl.kl_coef=0: an adaptive coefficient is multiplied at each step, so 0 stays 0; "
            "set algorithm.kl_ctrl.kl_coef=0.001."
        )
