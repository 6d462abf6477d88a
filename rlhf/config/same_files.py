"""Compares paths in settings. Different paths may name one file: relative, absolute, with `~` or `./`, or a link."""

import os
from collections.abc import Collection
from typing import Any

COMPARED_BY_SUFFIX = (
    "data.train_files",
    "data.val_files",
    "data.custom_cls.path",
    "model.path",
    "critic.path",
    "reward_model.path",
)
"""Settings in which a stored relative path may match the end of a present path: working directories may differ.

A resume also compares the content of these files, of the chat template and of user functions by fingerprint. A chat
template with another path but the same text is not a change: see `rlhf.checkpoint.load.stored_config`.
"""
PATHS = (
    *COMPARED_BY_SUFFIX,
    "model.chat_template",
    "reward.functions",
    "trainer.callbacks",
    "reward.writable",
    "env.classes",
    "env.template",
    "env.writable",
    "algorithm.adv_estimator",
    "actor.policy_loss.loss_mode",
    "trainer.default_local_dir",
    "data.cache_dir",
)


def same_value(key: str, stored: Any, present: Any) -> bool:
    """Return whether both values of a setting are equal, or name the same files in the same order.

    A stored relative path that does not exist here came from another working directory. In a setting of
    `COMPARED_BY_SUFFIX`, it equals the present path if the present path exists and ends with the stored path.
    """
    if stored == present:
        return True
    if key not in PATHS or not stored or not present:
        return False
    names, others = _names(stored), _names(present)
    return len(names) == len(others) and all(
        _resolved(a) == _resolved(b) or (key in COMPARED_BY_SUFFIX and _same_suffix(a, b))
        for a, b in zip(names, others, strict=True)
    )


def _names(value: Any) -> Collection[str]:
    return [value] if isinstance(value, str) else [str(name) for name in value]


def _resolved(name: str) -> str:
    file, colon, function = name.rpartition(":")
    if colon and file.endswith(".py"):
        return f"{_resolved(file)}:{function}"
    return os.path.realpath(os.path.expanduser(name))  # noqa: PTH111


def _same_suffix(stored: str, present: str) -> bool:
    if os.path.isabs(stored) or stored.startswith("~") or os.path.exists(stored):  # noqa: PTH110, PTH117
        return False
    end = os.path.normpath(stored)
    return os.path.exists(os.path.expanduser(present)) and _resolved(present).endswith(f"/{end}")  # noqa: PTH110, PTH111
