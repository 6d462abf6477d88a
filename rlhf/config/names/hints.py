"""Writes hints at the end of messages about a wrong name or value: what the user probably meant."""

import difflib
from collections.abc import Collection
from typing import Any

from rlhf.config.known_settings import SECTIONS, SETTINGS, Setting, setting_of
from rlhf.config.migrations import migrated_name, said_of
from rlhf.config.names.other_trainers import other_trainers
from rlhf.errors import did_you_mean, nearest


def own_recipe() -> str:
    """Return the sentence about a user's own recipe, which other trainers accept as a file path."""
    return other_trainers().remarks["config_file"]


def hint(key: str) -> str:
    """Return the hint for a wrong dotted key; empty if nothing is similar.

    In this order: a change of an older release's setting, the remark on another trainer's name, the nearest setting or
    group.
    """
    said = said_of(key) or remark(key)
    return f" {said}" if said else did_you_mean(nearest_setting(key))


def remark(key: str) -> str | None:
    """Return the hint for another trainer's name that has no single equivalent here; None if there is none."""
    remarks = other_trainers().remarks
    return remarks.get(key) or remarks.get(_without_prefix(key))


def nearest_setting(key: str) -> str | None:
    """Return the setting (or group) that a wrong dotted key most likely means; None if nothing is similar.

    In this order: an older release's name, another trainer's name, the same name in another section, a similar name.
    """
    if (present := migrated_name(key)) in SETTINGS:
        return present
    own, theirs = _without_prefix(key), other_trainers().settings
    if found := theirs.get(key) or theirs.get(own):
        return found
    if setting_of(own) or own in SECTIONS:
        return own
    section, _, name = own.rpartition(".")
    if same := [k for k in SETTINGS if k.rpartition(".")[2] == name]:
        return max(same, key=lambda k: difflib.SequenceMatcher(None, own, k).ratio())
    if elsewhere := theirs.get(name):  # another trainer's name, in our section for it
        for candidate in (f"{section}.{elsewhere.rpartition('.')[2]}", elsewhere):
            if setting_of(candidate) and candidate.partition(".")[0] == section.partition(".")[0]:
                return candidate
    if section in SECTIONS:
        found = nearest(name, [k.rpartition(".")[2] for k in SETTINGS if k.rpartition(".")[0] == section])
        return f"{section}.{found}" if found else None
    return nearest(own, [*SETTINGS, *SECTIONS])


def _without_prefix(key: str) -> str:
    return next((key.removeprefix(p) for p in other_trainers().prefixes if key.startswith(p)), key)


def meant(value: str, choices: Collection[str]) -> str | None:
    """Return the choice that a wrong value most likely means: another trainer's word for it, or a similar word."""
    if (ours := other_trainers().values.get(value)) is not None:
        return ours if ours in choices else None
    return nearest(value, choices)


def value_hint(key: str, value: str, choices: Collection[str]) -> str:
    """Return the hint for a value that is not one of the setting's choices; empty if no choice is similar."""
    said = other_trainers().value_remarks.get((key, value))
    return f" {said}" if said else did_you_mean(meant(value, choices))


def form_hint(setting: Setting, value: Any) -> str:
    """Return the hint for a value of the wrong type: how to write it; empty if there is nothing to suggest."""
    if not isinstance(value, str):
        return ""
    if setting.expects.startswith("a list"):
        return f" Write '{setting.key}=[{value}]'."
    bounds = value.split("_")
    if f"{setting.key}_lower" in SETTINGS and len(bounds) == 2:  # verl's text of two bounds
        return f" Write {setting.key}_lower={bounds[0]} {setting.key}={bounds[1]}."
    return ""


def instead(group: str, value: str, known: Collection[str]) -> str:
    """Return the hint for a `value` that is not an entry (`known`) of the configuration group `group`."""
    if found := setting_instead(group, value):
        return did_you_mean(found)
    if said := value_hint(group, value, known):
        return said
    if group == "model" and value[0].isalnum() and value != "null":
        return f" A folder or a Hub name is written model.path={value}."
    if group == "reward":
        return " A function of yours is written 'reward.functions=[FILE.py:NAME]'."
    return f" {own_recipe()}" if group == "recipes" and value.endswith((".yaml", ".yml")) else ""


def setting_instead(group: str, value: str) -> str | None:
    """Return the override for a model's folder, data file or function that was given to a group; None for others."""
    if group == "model" and "/" in value:
        return f"model.path={value}"
    if group == "data" and ("/" in value or "." in value):
        return f"data.train_files={value}"
    if group == "reward" and ":" in value:
        return f"'reward.functions=[{value}]'"
    return None
