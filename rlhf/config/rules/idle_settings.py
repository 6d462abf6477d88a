"""Settings without effect that are only logged: scripts of other trainers, and recipes, set many of them."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from rlhf.config import Config
from rlhf.config.algorithm_table import ESTIMATORS, POLICY_LOSSES
from rlhf.config.derived import needs_critic, needs_reward_model
from rlhf.config.known_settings import SETTINGS
from rlhf.config.rules.without_effect import without_effect


class _Need(NamedTuple):
    """Settings, and what they need to have an effect: in words, and as a condition."""

    keys: tuple[str, ...]
    needs: str
    holds: Callable[[Config], bool]


def _estimator(*names: str) -> Callable[[Config], bool]:
    """Return whether the estimator is one of `names`, or the user's, which may read any setting."""
    return lambda config: config.algorithm.adv_estimator in names or config.algorithm.adv_estimator not in ESTIMATORS


def _loss(*names: str) -> Callable[[Config], bool]:
    """Return whether the policy loss is one of `names`, or the user's."""
    return lambda config: (
        config.actor.policy_loss.loss_mode in names or config.actor.policy_loss.loss_mode not in POLICY_LOSSES
    )


def _has_old_tokens(config: Config) -> bool:
    """Return whether a step may train on tokens of an earlier policy."""
    return config.rollout.async_steps > 0 or config.algorithm.filter_groups.enable


_KL = "algorithm.kl_ctrl."
_GROUPS = "algorithm.filter_groups."
_CLIPPED = ("vanilla", "gspo", "cispo", "clip_cov")
NEEDS = (
    _Need(
        (f"{_KL}kl_coef", "algorithm.kl_penalty"),
        "algorithm.use_kl_in_reward=true",
        lambda config: config.algorithm.use_kl_in_reward,
    ),
    _Need(
        (f"{_KL}target_kl", f"{_KL}horizon"),
        f"{_KL}type=adaptive",
        lambda config: config.algorithm.kl_ctrl.type == "adaptive",
    ),
    _Need(
        ("actor.kl_loss_coef", "actor.kl_loss_type"),
        "actor.use_kl_loss=true",
        lambda config: config.actor.use_kl_loss,
    ),
    _Need(("ref.alpha",), "ref.update_freq=1", lambda config: config.ref.update_freq is not None),
    _Need(
        (f"{_GROUPS}metric", f"{_GROUPS}max_num_gen_batches", f"{_GROUPS}on_limit"),
        f"{_GROUPS}enable=true",
        lambda config: config.algorithm.filter_groups.enable,
    ),
    _Need(
        ("reward.overlong_buffer.penalty_factor",),  # not `len`: a recipe sets it for algorithm=dapo
        "reward.overlong_buffer.enable=true",
        lambda config: config.reward.overlong_buffer.enable,
    ),
    _Need(("algorithm.gamma",), "algorithm.adv_estimator=gae", _estimator("gae", "reinforce_plus_plus")),
    _Need(("algorithm.lam",), "algorithm.adv_estimator=gae", _estimator("gae")),
    _Need(("algorithm.norm_adv_by_std_in_grpo",), "algorithm.adv_estimator=grpo", _estimator("grpo", "pass_at_k")),
    _Need(("actor.clip_ratio_low", "actor.clip_ratio_high"), "actor.policy_loss.loss_mode=vanilla", _loss(*_CLIPPED)),
    _Need(("actor.clip_ratio_c",), "actor.policy_loss.loss_mode=vanilla", _loss("vanilla")),
    _Need(
        ("actor.optim.min_lr_ratio",),
        "actor.optim.lr_scheduler_type=cosine",
        lambda config: config.actor.optim.lr_scheduler_type != "constant",
    ),
    _Need(
        ("critic.optim.min_lr_ratio",),
        "critic.optim.lr_scheduler_type=cosine",
        lambda config: (
            config.critic.optim.lr_scheduler_type != "constant" or not needs_critic(config.algorithm, config.critic)
        ),
    ),
    _Need(
        ("algorithm.rollout_correction.rollout_is_threshold",),
        "algorithm.rollout_correction.rollout_is=token",
        lambda config: config.algorithm.rollout_correction.rollout_is is not None or _has_old_tokens(config),
    ),
    _Need(
        ("reward_model.revision", "reward_model.max_length"),
        "reward.functions=[reward_model]",
        lambda config: needs_reward_model(config.reward),
    ),
    _Need(("guards.max_events",), "guards.action=skip", lambda config: config.guards.action != "stop"),
)


def idle_settings(config: Config) -> Iterator[str]:
    """Yield one line per setting that differs from its default and has no effect. A coefficient may be 0."""
    for keys, needs, holds in NEEDS:
        if not holds(config):
            used = [key for key in keys if not (key.endswith("coef") and SETTINGS[key].value(config) == 0)]
            yield from without_effect(config, used, needs)
