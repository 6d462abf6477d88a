"""Checks the `reward` settings (functions, labels, weights) without running any function."""

import math
import os
from pathlib import Path

from rlhf.config.derived import needs_reward_model
from rlhf.config.schema.reward import REWARD_MODEL, RewardConfig
from rlhf.config.schema.reward_model import RewardModelConfig
from rlhf.config.user_functions import split_spec
from rlhf.errors import UserError, did_you_mean, nearest
from rlhf.reward.function import NAMES, SETTING, check_function, check_kwargs

# Metrics reward/<name> of every run, which no function's metric may replace.
RESERVED = ("mean", "min", "max", "std", "frac_zero_std", "overlong", "timeouts", "failures", "kl", "kl_coef")


def label_of(function: str) -> str:
    """Return the metric name of an entry of `reward.functions`: its own, or the part after the colon for a file."""
    return function if function in NAMES else split_spec(SETTING, function)[1]


def weights_of(config: RewardConfig) -> list[float]:
    return config.weights if config.weights is not None else [1.0] * len(config.functions)


def check_reward(config: RewardConfig, reward_model: RewardModelConfig) -> None:
    """Raise UserError for invalid names, files, labels or weights, and for a reward model without a path."""
    check_functions(config)
    if needs_reward_model(config) and reward_model.path is None:
        raise UserError(
            f"{SETTING}={config.functions}: {REWARD_MODEL} needs reward_model.path, a folder in Hugging "
            f"Face format or a Hub name. Set it, or remove {REWARD_MODEL}."
        )


def check_functions(config: RewardConfig) -> None:
    """Check the section `reward` alone, as `check_reward`."""
    setting = f"{SETTING}={config.functions}"
    if not config.functions:
        raise UserError(f"{setting}: name at least one of {', '.join(NAMES)} or path/to/file.py:name.")
    for function in config.functions:
        if function not in NAMES:
            _check_is_file(function)
            check_function(function)
    labels = [label_of(function) for function in config.functions]
    for i, label in enumerate(labels):
        if label in labels[:i]:
            raise UserError(f"{setting}: two entries would both log reward/{label}. Rename or remove one.")
        if label in RESERVED:
            raise UserError(f"{setting}: the metric reward/{label} is reserved. Rename the function {label}.")
    check_kwargs(config)
    _check_weights(config)
    _check_confinement(config)


def _check_confinement(config: RewardConfig) -> None:
    for name in config.pass_env:
        if name not in os.environ:
            raise UserError(f"reward.pass_env={config.pass_env}: {name} is not set. Set it, or remove it here.")
    for folder in config.writable:
        if not Path(folder).expanduser().is_dir():
            raise UserError(
                f"reward.writable={config.writable}: {folder} is not a folder. Create it, or remove it here."
            )


def _check_is_file(function: str) -> None:
    if ":" in function or "/" in function or function.endswith(".py"):
        return  # `split_spec` reports a wrong form
    raise UserError(
        f"{SETTING}: {function!r} is none of {', '.join(NAMES)}, and not of the form path/to/file.py:name."
        f"{did_you_mean(nearest(function, NAMES))}"
    )


def _check_weights(config: RewardConfig) -> None:
    weights = weights_of(config)
    setting = f"reward.weights={weights}"
    if len(weights) != len(config.functions):
        raise UserError(
            f"{setting}: {len(weights)} for {len(config.functions)} functions ({', '.join(config.functions)}). "
            "Set one weight for each function, or null."
        )
    if not all(map(math.isfinite, weights)):
        raise UserError(f"{setting}: must be finite numbers.")
    if not any(weights):
        raise UserError(f"{setting}: every reward would be 0. Give one of the functions another weight.")
