"""Checks the section `env`, also against the rollout settings."""

from collections.abc import Iterable, Iterator
from typing import Any

from rlhf.config import Config


def env_problems(config: Config) -> Iterator[str]:
    """Yield one line per rollout setting that a run with environments cannot use."""
    if not config.env.used:
        return
    rollout, shown = config.rollout, config.env.shown
    if config.env.classes and config.env.command is not None:
        yield f"env.classes={config.env.classes}: {shown} is an environment, too. Set one of them."
    if config.env.command is not None and config.env.process == "pooled" and config.env.num_workers != 2:
        yield (
            f"env.num_workers={config.env.num_workers}: with {shown}, each episode has a process of its own. Remove "
            "env.num_workers."
        )
    if rollout.name not in ("embedded", None):
        yield f"rollout.name={rollout.name}: {shown} needs the built-in engine. Set rollout=embedded."
    if rollout.async_steps:
        yield (
            f"rollout.async_steps={rollout.async_steps}: with {shown}, each step generates its episodes whole. Set "
            "rollout.async_steps=0."
        )
    if rollout.stop:
        yield f"rollout.stop={rollout.stop}: with {shown}, a turn ends with the end-of-turn token. Set rollout.stop=[]."
    if rollout.ignore_eos:
        yield f"rollout.ignore_eos=true: with {shown}, no turn would end. Set rollout.ignore_eos=false."


def idle_env(config: Config, given: Iterable[tuple[str, Any]]) -> Iterator[str]:
    """Yield one line per setting `env` on the command line (`given`, not a recipe) if the run has no environment."""
    if config.env.used:
        return
    for key, value in given:
        if key.startswith("env.") and key not in ("env.classes", "env.command"):
            yield (
                f"{key}={value}: has no effect without an environment. Set env.classes=[FILE.py:CLASS] or "
                "env.command='python FILE.py', or remove it."
            )
