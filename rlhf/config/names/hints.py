"""Writes hints at the end of messages about a wrong name or value: what the user probably meant."""

import difflib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from rlhf.config.known_settings import SECTIONS, SETTINGS, Setting, setting_of
from rlhf.config.migrations import migrated_name, release_hint
from rlhf.config.names.other_trainers import other_trainers
from rlhf.errors import did_you_mean, nearest

DATA_ENDINGS = (".csv", ".json", ".jsonl", ".parquet")
GENERAL = frozenset({"device", "enable", "enabled", "mode", "name", "path", "type"})
"""Last parts of setting names that are ambiguous without the part before them."""


def recipe_hint() -> str:
    """Return the hint for a recipe given as a file path, which other trainers accept."""
    return other_trainers().remarks["config_file"]


def hint(key: str) -> str:
    """Return the hint for a wrong dotted key; empty if nothing is similar.

    Return the first of these that exists: a sentence about a setting that an older release had, the remark on another
    trainer's name, the nearest setting or group, the remark on another trainer's name in one of our sections.
    """
    found = release_hint(key) or remark(key)
    if found is None and (near := nearest_setting(key)):
        return did_you_mean(near)
    found = found or remark(key.rpartition(".")[2])
    return f" {found}" if found else ""


def remark(key: str) -> str | None:
    """Return the remark on another trainer's name that has no single equivalent here; None for other names."""
    remarks = other_trainers().remarks
    return remarks.get(key) or remarks.get(_without_prefix(key))


def nearest_setting(key: str) -> str | None:
    """Return the setting (or group) that a wrong dotted key most likely means; None if nothing is similar.

    Return the first of these that exists: an older release's name, another trainer's name, the same name in another
    section, a similar name.
    """
    if (present := migrated_name(key)) in SETTINGS:
        return present
    own, theirs = _without_prefix(key), other_trainers().settings
    if found := theirs.get(key) or theirs.get(own):
        return found
    if setting_of(own) or own in SECTIONS:
        return own
    section, _, name = own.rpartition(".")
    if same := [k for k in SETTINGS if k.rpartition(".")[2] == name and (name not in GENERAL or _near_words(own, k))]:
        return max(same, key=lambda k: difflib.SequenceMatcher(None, own, k).ratio())
    if elsewhere := theirs.get(name, ""):  # another trainer's name in one of our sections
        for candidate in (f"{section}.{elsewhere.rpartition('.')[2]}", elsewhere):
            if setting_of(candidate) and candidate.partition(".")[0] == section.partition(".")[0]:
                return candidate
    if section in SECTIONS:
        found = nearest(name, [k.rpartition(".")[2] for k in SETTINGS if k.rpartition(".")[0] == section])
        return f"{section}.{found}" if found else elsewhere or None
    return nearest(own, [*SETTINGS, *SECTIONS])


def _near_words(key: str, other: str) -> bool:
    """Return whether the words before the last one are the same or similar."""
    word, another = ((text.split(".")[-2:-1] or [""])[0] for text in (key, other))
    return not word or nearest(word, [another]) is not None


def _without_prefix(key: str) -> str:
    return next((key.removeprefix(p) for p in other_trainers().prefixes if key.startswith(p)), key)


def likely_choice(value: str, choices: Collection[str]) -> str | None:
    """Return the choice that a wrong value most likely means: another trainer's word for it, or a similar word."""
    if (ours := other_trainers().values.get(value)) is not None:
        return ours if ours in choices else None
    return nearest(value, choices)


def list_problems(key: str, names: Collection[str], known: Collection[str]) -> Iterator[str]:
    """Yield one line per unknown name in the list setting `key`, and one line if a name is repeated."""
    for name in names:
        if name not in known:
            yield f"{key}={names}: {name!r} is not one of {', '.join(known)}.{did_you_mean(nearest(name, known))}"
    if len(set(names)) < len(names):
        yield f"{key}={names}: list each name once."


def value_hint(key: str, value: str, choices: Collection[str]) -> str:
    """Return the hint for a value that is not one of the setting's choices; empty if no choice is similar."""
    found = other_trainers().value_remarks.get((key, value))
    return f" {found}" if found else did_you_mean(likely_choice(value, choices))


def syntax_hint(setting: Setting, value: Any) -> str:
    """Return the hint for a value of the wrong type: how to write it; empty without a suggestion."""
    if not isinstance(value, str):
        return ""
    if setting.expects.startswith("a list"):
        return f" Write '{setting.key}=[{value}]'."
    bounds = value.split("_")
    if f"{setting.key}_lower" in SETTINGS and len(bounds) == 2:  # verl's two bounds in one string
        return f" Write {setting.key}_lower={bounds[0]} {setting.key}={bounds[1]}."
    return ""


def entry_hint(group: str, value: str, known: Collection[str]) -> str:
    """Return the hint for a `value` that is not an entry (`known`) of the configuration group `group`."""
    if found := override_for(group, value):
        return did_you_mean(found)
    if text := value_hint(group, value, known):
        return text
    if group == "model" and value[0].isalnum() and value != "null":
        return f" For a folder or a Hub name, write model.path={value}."
    if group == "reward":
        return " For your own function, write 'reward.functions=[FILE.py:NAME]'."
    return f" {recipe_hint()}" if group == "recipes" and value.endswith((".yaml", ".yml")) else ""


def override_for(group: str, value: str) -> str | None:
    """Return the override to write if `value` is a model's folder, a data file or a function, not a group's entry."""
    if group == "model" and ("/" in value or Path(value).is_dir()):
        return f"model.path={value}"
    if group == "data" and ("/" in value or "." in value):
        return f"data.train_files={value}"
    if group == "reward" and ":" in value:
        return f"'reward.functions=[{value}]'"
    return None


def path_override(text: str) -> str | None:
    """Return the override to write for a model folder or data file typed without its setting; None for other texts."""
    if Path(text).is_file() and text.endswith(DATA_ENDINGS):
        return f"data.train_files={text}"
    return f"model.path={text}" if (Path(text) / "config.json").is_file() else None
