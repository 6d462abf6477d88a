"""Checks the section `env`, also against the rollout settings."""

import shlex
from collections.abc import Iterable, Iterator
from typing import Any

from rlhf.config import Config
from rlhf.config.rules.without_effect import without_effect
from rlhf.config.secrets import Hidden, hide


def env_problems(config: Config) -> Iterator[str]:
    """Yield one line per setting of `env` or `rollout` that a run with environments cannot use."""
    if not config.env.used:
        return
    rollout, shown = config.rollout, config.env.shown
    if config.env.classes and config.env.command is not None:
        yield f"env.classes={config.env.classes}: {shown} is an environment, too. Set only one of the two."
    if config.env.command is not None:
        if _has_secret(config.env.command):
            yield (
                "env.command: it contains a secret, which the run would store. Put the secret into an environment "
                "variable, and name the variable in env.pass_env."
            )
        yield from without_effect(config, ["env.num_workers", "env.process"], "env.classes", [])
    else:
        yield from without_effect(config, ["env.max_rows"], "env.command")
    if config.env.reward_weight == 0 and not config.reward.functions:
        yield (
            f"env.reward_weight={config.env.reward_weight}: with reward.functions=[], every response would get reward "
            "0. Set env.reward_weight=1, or name a function in reward.functions."
        )
    if rollout.async_steps:
        yield (
            f"rollout.async_steps={rollout.async_steps}: with {shown}, each step generates complete episodes. Set "
            "rollout.async_steps=0."
        )
    if rollout.stop:
        yield f"rollout.stop={rollout.stop}: with {shown}, a turn ends with the end-of-turn token. Set rollout.stop=[]."
    if rollout.ignore_eos:
        yield f"rollout.ignore_eos=true: with {shown}, no turn would end. Set rollout.ignore_eos=false."


def _has_secret(command: str) -> bool:
    try:
        words = shlex.split(command)
    except ValueError:  # `check_environments` reports open quotes
        return False
    return any(isinstance(word, Hidden) for word in hide(words, None, "env.command", free=True))


def idle_env(config: Config, given: Iterable[tuple[str, Any]]) -> Iterator[str]:
    """Yield one line per setting of `env` on the command line (`given`) if the run has no environment."""
    if config.env.used:
        return
    for key, value in given:
        if key.startswith("env.") and key not in ("env.classes", "env.command"):
            yield (
                f"{key}={value}: has no effect without an environment. Set env.classes=[FILE.py:CLASS] or "
                "env.command='python FILE.py', or remove it."
            )
