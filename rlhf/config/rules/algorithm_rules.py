"""Checks the algorithm: names and files of its functions, and the requirements of its estimator."""

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import fields
from typing import Any

from rlhf.config import Config
from rlhf.config.algorithm_table import ALGORITHMS, ESTIMATORS, POLICY_LOSSES, SETTINGS_OF_ONE_FUNCTION
from rlhf.config.derived import estimator_needs, needs_critic, needs_reference
from rlhf.config.known_settings import SETTINGS
from rlhf.config.names.hints import value_hint
from rlhf.config.rules.without_effect import without_effect
from rlhf.config.user_functions import check_positional
from rlhf.errors import UserError

ESTIMATOR_ARGUMENTS = ("inputs", "config")
POLICY_LOSS_ARGUMENTS = ("log_probs", "old_log_probs", "advantages", "mask", "config")


def idle_critic(config: Config, given: Iterable[tuple[str, Any]]) -> Iterator[str]:
    """Yield one line per critic setting in `given`, the command line without recipes, if the run has no critic."""
    if needs_critic(config.algorithm, config.critic):
        return
    for key, value in given:
        if key.startswith("critic.") and key != "critic.enable" and value is not None:
            yield (
                f"{key}={value}: has effect only with a critic, and algorithm.adv_estimator="
                f"{config.algorithm.adv_estimator} trains no critic. Remove it, or set algorithm=ppo."
            )


def algorithm_problems(config: Config) -> Iterator[str]:
    """Yield one line per wrong name, wrong user file (read, not run) or setting that the estimator cannot use."""
    names = (
        ("algorithm.adv_estimator", config.algorithm.adv_estimator, ESTIMATORS, ESTIMATOR_ARGUMENTS),
        ("actor.policy_loss.loss_mode", config.actor.policy_loss.loss_mode, POLICY_LOSSES, POLICY_LOSS_ARGUMENTS),
    )
    yield from (problem for name in names if (problem := _wrong_name(*name)))
    yield from _idle(config)
    yield from _samples(config)
    if config.algorithm.mask_truncated_responses and config.rollout.ignore_eos:
        yield (
            "algorithm.mask_truncated_responses=true: with rollout.ignore_eos=true nearly every response reaches the "
            "length limit and would be masked; set rollout.ignore_eos=false."
        )
    yield from _critic(config)
    yield from _reference(config)


def _idle(config: Config) -> Iterator[str]:
    """Yield one line per setting that the chosen function does not read, but another bundled function does.

    A user's function may read any setting.
    """
    chosen = (("algorithm.adv_estimator", ESTIMATORS), ("actor.policy_loss.loss_mode", POLICY_LOSSES))
    for key, known in chosen:
        name = SETTINGS[key].value(config)
        for setting, owner in SETTINGS_OF_ONE_FUNCTION.items():
            if name in known and owner in known and name != owner:
                yield from without_effect(config, [setting], f"{key}={owner}", name)


def _wrong_name(setting: str, name: str, known: Collection[str], arguments: tuple[str, ...]) -> str | None:
    if name in known:
        return None
    if ":" in name:
        try:
            check_positional(setting, name, arguments)
        except UserError as error:
            return str(error)
        return None
    if name in ALGORITHMS:
        return f"{setting}={name}: {name} is a whole algorithm; write algorithm={name}."
    return (
        f"{setting}={name}: must be one of {', '.join(known)}, or path/to/file.py:function."
        f"{value_hint(setting, name, known)}"
    )


def correction_problems(config: Config) -> Iterator[str]:
    """Yield one line per bound of `rollout_correction` that is missing, in the wrong order, or without effect."""
    c, section = config.algorithm.rollout_correction, "algorithm.rollout_correction"
    lower, least, kind = c.rollout_is_threshold_lower, c.rollout_rs_threshold_lower, c.rollout_rs
    if c.rollout_is is None:
        key = f"{section}.rollout_is_threshold_lower"
        yield from without_effect(config, [key], f"{section}.rollout_is", remedy=f"{section}.rollout_is=token")
    elif lower is not None and lower >= (upper := c.rollout_is_threshold):
        yield f"{section}.rollout_is_threshold_lower={lower}: must be less than {section}.rollout_is_threshold={upper}."
    if kind is None:
        keys = (f"{section}.rollout_rs_threshold", f"{section}.rollout_rs_threshold_lower")
        yield from without_effect(config, keys, f"{section}.rollout_rs", remedy=f"{section}.rollout_rs=token_k1")
        return
    if c.rollout_rs_threshold is None:
        usual = 2.0 if kind.endswith("k1") else 0.1
        yield f"{section}.rollout_rs={kind}: needs a bound; set {section}.rollout_rs_threshold, e.g. to {usual}."
    elif kind.endswith("k1"):
        smallest = 1 / c.rollout_rs_threshold if least is None else least
        if smallest >= c.rollout_rs_threshold:
            source = "rollout_rs_threshold_lower" if least is not None else "1 / rollout_rs_threshold"
            yield (
                f"{section}.rollout_rs_threshold={c.rollout_rs_threshold}: is the largest ratio of {kind}, and must be "
                f"more than the smallest ratio, {smallest:g} ({source}); set a value above "
                f"{1 if least is None else least:g}."
            )
    if not kind.endswith("k1"):
        needs = f"a k1 measure (rollout_rs={kind})"
        remedy = f"{section}.rollout_rs={kind.rpartition('_')[0].replace('max', 'mean')}_k1"
        yield from without_effect(config, [f"{section}.rollout_rs_threshold_lower"], needs, remedy=remedy)


def reward_problems(config: Config) -> Iterator[str]:
    """Yield one line for a reward normalization without effect, and one for an invalid `reward_clip_range`."""
    algorithm, name = config.algorithm, config.algorithm.adv_estimator
    kind, bounds = algorithm.normalize_reward, algorithm.reward_clip_range
    if bounds is not None and not (len(bounds) == 2 and all(map(math.isfinite, bounds)) and bounds[0] < bounds[1]):
        yield f"algorithm.reward_clip_range={bounds}: must be two numbers, the lower one first, such as [-5.0,5.0]."
    by_deviation = name in ("grpo", "pass_at_k") and algorithm.norm_adv_by_std_in_grpo
    undone = by_deviation or name == "reinforce_plus_plus_baseline"
    if kind is not None and undone and bounds is None and not algorithm.kl_in_reward:
        yield (
            f"algorithm.normalize_reward={kind}: has no effect with {name}, which divides by a standard deviation "
            "itself; set algorithm.normalize_reward=null, or set algorithm.reward_clip_range."
        )


def entropy_problems(config: Config) -> Iterator[str]:
    """Yield one line per setting of the adaptive entropy bonus that has no effect or contradicts another."""
    control, start = config.actor.entropy_ctrl, config.actor.entropy_coeff
    if control.type != "adaptive":
        keys = (f"actor.entropy_ctrl.{field.name}" for field in fields(control))
        yield from without_effect(config, keys, "actor.entropy_ctrl.type=adaptive")
    elif control.min_coeff > control.max_coeff:
        yield (
            f"actor.entropy_ctrl.min_coeff={control.min_coeff}: must be at most "
            f"actor.entropy_ctrl.max_coeff={control.max_coeff}."
        )
    elif not control.min_coeff <= start <= control.max_coeff:
        yield (
            f"actor.entropy_coeff={start}: the starting value of the adaptive coefficient must be within "
            f"actor.entropy_ctrl.min_coeff={control.min_coeff} and max_coeff={control.max_coeff}."
        )


def _samples(config: Config) -> Iterator[str]:
    name, rollout = config.algorithm.adv_estimator, config.rollout
    estimator = estimator_needs(config.algorithm.adv_estimator)
    if estimator.group and rollout.n < 2:
        yield f"rollout.n={rollout.n}: {name} compares the samples of one prompt; set rollout.n to 2 or more."
    if name == "pass_at_k" and 1 < rollout.n <= config.algorithm.pass_at_k:
        yield (
            f"algorithm.pass_at_k={config.algorithm.pass_at_k}: must be less than rollout.n={rollout.n}, or the best "
            f"sample is always the same; set algorithm.pass_at_k={max(rollout.n // 2, 1)}, or a larger rollout.n."
        )
    for key, value, remedy in (("top_k", 1, -1), ("min_p", 1, 0)):
        if estimator.greedy_baseline and getattr(rollout, key) == value:
            yield (
                f"rollout.{key}={value}: {name} compares samples with the greedy response, and all samples would "
                f"equal it; set rollout.{key}={remedy}."
            )


def _critic(config: Config) -> Iterator[str]:
    name, enabled, warmup = config.algorithm.adv_estimator, config.critic.enable, config.trainer.critic_warmup
    if enabled is False and estimator_needs(config.algorithm.adv_estimator).critic:
        yield f"critic.enable=false: {name} needs values; set critic.enable=null, or another algorithm.adv_estimator."
    if enabled and name in ESTIMATORS and not ESTIMATORS[name].critic:
        yield f"critic.enable=true: {name} computes no returns to train a critic on; set critic.enable=null."
    if warmup and not needs_critic(config.algorithm, config.critic):
        yield f"trainer.critic_warmup={warmup}: {name} trains no critic; set trainer.critic_warmup=0."


def _reference(config: Config) -> Iterator[str]:
    if config.ref.update_freq is not None and not needs_reference(config.actor, config.algorithm):
        yield (
            f"ref.update_freq={config.ref.update_freq}: the run has no KL term, so it has no reference policy; set "
            "ref.update_freq=null, or actor.use_kl_loss=true or algorithm.use_kl_in_reward=true with a coefficient "
            "above 0."
        )
    if config.ref.update_freq is not None and config.ref.fsdp_config.model_dtype == "bfloat16":
        yield (
            f"ref.fsdp_config.model_dtype={config.ref.fsdp_config.model_dtype}: would round away the small updates of "
            f"the reference (ref.update_freq={config.ref.update_freq}); set ref.fsdp_config.model_dtype=null, or "
            "ref.update_freq=null."
        )
