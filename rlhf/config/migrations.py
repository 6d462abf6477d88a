"""Migrates stored settings: what each release renamed, moved, removed and added.

Only stored settings are migrated. For an old name that a user types, `rlhf.config.names.hints` finds a hint here. A
test compares the schema with the stored schema of each release, so each renamed, removed or added setting needs an
entry in `MIGRATIONS`. Imports no schema.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from packaging.version import InvalidVersion, Version

ANY = object()
"""Value of `Removed.acts_as` for a setting that never affected a run's numbers."""


@dataclass(frozen=True)
class Renamed:
    """A setting with a new name, perhaps in another section.

    `value` returns the value under the new name, from the stored value and the stored sections. None keeps the value.
    """

    key: str
    to: str
    value: Callable[[Any, dict[str, Any]], Any] | None = None


@dataclass(frozen=True)
class Removed:
    """A setting that a release removed.

    `acts_as` is the stored value that current runs still reproduce, or `ANY`. A run with any other stored value would
    continue as a different run. `remedy` is a sentence for users who set the removed setting.
    """

    key: str
    acts_as: Any
    remedy: str


@dataclass(frozen=True)
class Added:
    """A new setting. `value` makes a run compute as it did before the release; the default may differ."""

    key: str
    value: Any


@dataclass(frozen=True)
class Restated:
    """A setting with a new value of the same effect. `value` returns the current value for a stored value."""

    key: str
    value: Callable[[Any], Any]


Migration = Renamed | Removed | Added | Restated


def _null_for_float32(stored: Any) -> Any:
    """Return null for the old default, float32: null is the default now, and gives the same log-probs."""
    return None if stored == "float32" else stored


def _at_least_async_steps(stored: Any, tree: dict[str, Any]) -> Any:
    """Return the bound that applied: max(`stored`, `async_steps`); without dynamic sampling, max(1, `async_steps`)."""
    steps = tree["rollout"]["async_steps"] if _has(tree, "rollout.async_steps") else 0
    filters = tree["algorithm"]["filter_groups"] if _has(tree, "algorithm.filter_groups.enable") else {}
    if not isinstance(stored, int) or not isinstance(steps, int):
        return stored
    return max(stored, steps) if filters.get("enable") else max(1, steps)


MIGRATIONS: dict[str, tuple[Migration, ...]] = {
    "0.2.0": (
        Renamed("algorithm.filter_groups.max_staleness", "rollout.max_staleness", _at_least_async_steps),
        Restated("ref.fsdp_config.model_dtype", _null_for_float32),
        Restated("reward_model.fsdp_config.model_dtype", _null_for_float32),
        Added("rollout.sampling_mask", False),
        Added("data.last_turn_as_answer", False),
        Added("data.custom_cls.path", None),
        Added("data.custom_cls.name", None),
        Added("env.classes", []),
        Added("env.kwargs", {}),
        Added("env.command", None),
        Added("env.template", None),
        Added("env.announce_tools", True),
        Added("env.max_turns", 8),
        Added("env.max_rows", 8),
        Added("env.max_invalid_calls", 3),
        Added("env.timeout_s", 30.0),
        Added("env.retries", 1),
        Added("env.max_failed", 0.5),
        Added("env.reward_weight", 1.0),
        Added("env.process", "pooled"),
        Added("env.num_workers", 2),
        Added("env.max_concurrent", 64),
        Added("env.pass_env", []),
        Added("env.network", False),
        Added("env.writable", []),
        Added("env.memory_gb", 8.0),
        Added("trainer.callbacks", []),
        Added("trainer.callback_kwargs", {}),
        Added("trainer.nnodes", 1),
        Added("launcher.name", "local"),
        Added("launcher.address", None),
        Added("launcher.min_nodes", None),
        Added("launcher.start_timeout_s", 60.0),
        Added("checkpoint.memory.freq", 0),
        Added("checkpoint.memory.dir", "/dev/shm"),
        Added("checkpoint.memory.replicas", 0),
        Added("tracking.mlflow.tracking_uri", None),
        Added("tracking.alerts.kinds", ["stuck", "unstable", "crashed", "finished"]),
        Added("tracking.alerts.command", []),
        Added("tracking.alerts.webhook", None),
        Added("tracking.alerts.first_step", 100),
        Added("tracking.alerts.timeout_s", 10.0),
    ),
}
"""Changes by release, oldest release first. The changes of a release apply in the order of the tuple."""


@dataclass(frozen=True)
class Lost:
    """A stored value of a removed setting that the current release cannot reproduce. `release` removed the setting."""

    release: str
    setting: Removed
    stored: Any


@dataclass(frozen=True)
class Migrated:
    """A stored configuration under the current names, and the stored values that have no equivalent."""

    tree: dict[str, Any]
    lost: list[Lost]


def migrate(tree: dict[str, Any], release: str | None = None) -> Migrated:
    """Return the stored sections `tree` under the current names, without changing `tree`.

    Skips changes that `tree` already has, so a tree that was stored between two releases can be read as well.

    Args:
        release: the release that stored `tree`. None, or a string that is not a version, applies the changes of all
            releases.
    """
    # Promise 19.
    tree, lost = deepcopy(tree), []
    for later, migrations in _after(release):
        for change in migrations:
            if isinstance(change, Added):
                if not _has(tree, change.key):
                    _put(tree, change.key, deepcopy(change.value))
            elif _has(tree, change.key):
                value = _pop(tree, change.key)
                if isinstance(change, Restated):
                    _put(tree, change.key, change.value(value))
                elif isinstance(change, Removed):
                    lost += [Lost(later, change, value)] if change.acts_as not in (ANY, value) else []
                elif not _has(tree, change.to):
                    _put(tree, change.to, value if change.value is None else change.value(value, tree))
    return Migrated(tree, lost)


def migrated_name(key: str, release: str | None = None) -> str:
    """Return the current name of the setting that `release` called `key`; a removed setting keeps its name."""
    for _, migrations in _after(release):
        for change in migrations:
            if isinstance(change, Renamed) and change.key == key:
                key = change.to
    return key


def release_hint(key: str) -> str | None:
    """Return a sentence about a setting that an older release renamed or removed; None for other names."""
    release, name = None, key
    for later, migrations in MIGRATIONS.items():
        for change in migrations:
            if isinstance(change, Removed) and change.key == name:
                return f"Release {later} removed it. {change.remedy}"
            if isinstance(change, Renamed) and change.key == name:
                release, name = later, change.to
    return None if release is None else f"Release {release} renamed it. Did you mean {name}?"


def _after(release: str | None) -> list[tuple[str, tuple[Migration, ...]]]:
    try:
        known = None if release is None else Version(release)
    except InvalidVersion:
        known = None
    return [(later, changes) for later, changes in MIGRATIONS.items() if known is None or Version(later) > known]


def _section(tree: dict[str, Any], key: str) -> Any:
    section: Any = tree
    for name in key.split(".")[:-1]:
        section = section.get(name) if isinstance(section, dict) else None
    return section


def _has(tree: dict[str, Any], key: str) -> bool:
    section = _section(tree, key)
    return isinstance(section, dict) and key.rpartition(".")[2] in section


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    section = tree
    *parents, name = key.split(".")
    for parent in parents:
        below = section.get(parent)
        if below is None:  # missing, or stored as null
            below = section[parent] = {}
        if not isinstance(below, dict):  # not a section: the schema rejects it later
            return
        section = below
    section[name] = value


def _pop(tree: dict[str, Any], key: str) -> Any:
    """Remove a setting and the sections that become empty. Return the setting's value."""
    parent, _, name = key.rpartition(".")
    value = _section(tree, key).pop(name)
    while parent and not _section(tree, f"{parent}.x"):
        above, _, name = parent.rpartition(".")
        del _section(tree, parent)[name]
        parent = above
    return value
