"""Migrations of stored settings: what each release renamed, moved, removed and added.

What a user types is not migrated: `rlhf.config.names.hints` makes hints of this table. A test compares the schema
with the one that each release stored: without a line here no setting can be renamed, removed or added. Imports no
schema.
"""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from packaging.version import InvalidVersion, Version

ANY = object()
"""In `Removed.acts_as`: no run's numbers depended on the setting."""


@dataclass(frozen=True)
class Renamed:
    """A setting that has another name, perhaps in another section."""

    key: str
    to: str


@dataclass(frozen=True)
class Removed:
    """A setting that is gone.

    `acts_as`: the value with which every run computes now, or `ANY`; a run that stored another value becomes another
    run. `remedy`: a sentence for users who set it.
    """

    key: str
    acts_as: Any
    remedy: str


@dataclass(frozen=True)
class Added:
    """A new setting. `value`: the one that computes as the releases before it did, whatever the default is."""

    key: str
    value: Any


Migration = Renamed | Removed | Added

MIGRATIONS: dict[str, tuple[Migration, ...]] = {}
"""By the release that made the changes, oldest first; within a release they apply in this order."""


@dataclass(frozen=True)
class Lost:
    """A stored value of a setting that is gone, with the present meaning of its absence."""

    release: str
    setting: Removed
    stored: Any


@dataclass(frozen=True)
class Migrated:
    """A stored configuration under the present names, and what of it has no place there."""

    tree: dict[str, Any]
    lost: list[Lost]


def migrate(tree: dict[str, Any], release: str | None = None) -> Migrated:
    """Return the stored sections `tree` under the present names; `tree` stays as it is.

    Args:
        release: the release that stored them; None, or what is no release, for any. A change that `tree` already shows
            is left out, so trees between two releases are read as well.
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
                if isinstance(change, Removed):
                    lost += [Lost(later, change, value)] if change.acts_as not in (ANY, value) else []
                elif not _has(tree, change.to):
                    _put(tree, change.to, value)
    return Migrated(tree, lost)


def migrated_name(key: str, release: str | None = None) -> str:
    """The present name of a setting that a release knew as `key`; a removed one keeps its name."""
    for _, migrations in _after(release):
        for change in migrations:
            if isinstance(change, Renamed) and change.key == key:
                key = change.to
    return key


def said_of(key: str) -> str | None:
    """A sentence about a setting that some release knew as `key`, and this one does not; None for any other name."""
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
    """The section that holds the setting `key`; None where the tree has none."""
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
        below = section.setdefault(parent, {})
        if not isinstance(below, dict):  # no configuration of ours; whoever reads it says so
            return
        section = below
    section[name] = value


def _pop(tree: dict[str, Any], key: str) -> Any:
    """Take a setting out, and the sections that hold nothing more."""
    parent, _, name = key.rpartition(".")
    value = _section(tree, key).pop(name)
    while parent and not _section(tree, f"{parent}.x"):
        above, _, name = parent.rpartition(".")
        del _section(tree, parent)[name]
        parent = above
    return value
