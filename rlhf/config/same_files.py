"""Compares paths in settings: one file has many spellings (relative, absolute, `~`, `./`, a link)."""

import os
from collections.abc import Collection
from typing import Any

JUDGED_BY_END = ("data.train_files", "data.val_files", "model.path", "critic.path", "reward_model.path")
"""Settings whose files count as the same if their paths have the same end, after a start in another folder.

A resume compares their prompts and models by fingerprint, too, as it does with the chat template and user functions. A
template with another path but the same text is no change: see `rlhf.checkpoint.load.stored_config`.
"""
PATHS = (
    *JUDGED_BY_END,
    "model.chat_template",
    "reward.functions",
    "reward.writable",
    "algorithm.adv_estimator",
    "actor.policy_loss.loss_mode",
    "trainer.default_local_dir",
    "data.cache_dir",
)


def same_value(key: str, stored: Any, present: Any) -> bool:
    """Return whether both values of a setting are equal, or name the same files in the same order.

    A relative path that does not exist here was written in another folder. For `JUDGED_BY_END` the same end of the path
    is then enough.
    """
    if stored == present:
        return True
    if key not in PATHS or not stored or not present:
        return False
    names, others = _names(stored), _names(present)
    return len(names) == len(others) and all(
        _resolved(a) == _resolved(b) or (key in JUDGED_BY_END and _of_elsewhere(a, b))
        for a, b in zip(names, others, strict=True)
    )


def _names(value: Any) -> Collection[str]:
    return [value] if isinstance(value, str) else [str(name) for name in value]


def _resolved(name: str) -> str:
    file, colon, function = name.rpartition(":")
    if colon and file.endswith(".py"):
        return f"{_resolved(file)}:{function}"
    return os.path.realpath(os.path.expanduser(name))  # noqa: PTH111


def _of_elsewhere(stored: str, present: str) -> bool:
    if os.path.isabs(stored) or stored.startswith("~") or os.path.exists(stored):  # noqa: PTH110, PTH117
        return False
    end = os.path.normpath(stored)
    return os.path.exists(os.path.expanduser(present)) and _resolved(present).endswith(f"/{end}")  # noqa: PTH110, PTH111
