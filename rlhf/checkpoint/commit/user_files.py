"""Hashes the users' files that a manifest's `fingerprints` record: functions, environments and chat templates.

Imports no torch.
"""

from pathlib import Path
from typing import Any

from rlhf.config.agent_command import COMMAND, files_of
from rlhf.config.schema.actor import ActorConfig
from rlhf.config.schema.algorithm import AlgorithmConfig
from rlhf.config.schema.env import EnvConfig
from rlhf.config.schema.model import ModelConfig
from rlhf.config.schema.reward import RewardConfig
from rlhf.config.user_functions import hash_of_files
from rlhf.models.fingerprint import fingerprint_file

FUNCTIONS = ("reward.functions", "env.classes", "algorithm.adv_estimator", "actor.policy_loss.loss_mode")
TEMPLATES = ("model.chat_template", "env.template")
USER_FILES = (*FUNCTIONS, COMMAND, *TEMPLATES)
"""Settings that name users' functions, environments or chat templates."""


def user_files(
    reward: RewardConfig, algorithm: AlgorithmConfig, actor: ActorConfig, model: ModelConfig, env: EnvConfig
) -> dict[str, str]:
    """Return, for each setting that names users' functions, environments or chat templates, a hash of its files.

    The files change the run just as settings do. Files that the functions import are not hashed.
    """
    values = (
        reward.functions,
        env.classes,
        algorithm.adv_estimator,
        actor.policy_loss.loss_mode,
        env.command,
        model.chat_template,
        env.template,
    )
    hashes = {key: hash_of_value(key, value) for key, value in zip(USER_FILES, values, strict=True)}
    return {key: digest for key, digest in hashes.items() if digest is not None}


def hash_of_value(setting: str, value: Any) -> str | None:
    """Return the hash of the files that `value` of a setting in USER_FILES names; None if it names no user's file.

    Raise OSError if a file cannot be read.
    """
    if value is None:
        return None
    if setting in TEMPLATES:
        return fingerprint_file(Path(value).expanduser())
    if setting == COMMAND:
        return hash_of_files(files_of(value))
    names = [value] if isinstance(value, str) else value
    return hash_of_files(names) if any(".py:" in name for name in names) else None
