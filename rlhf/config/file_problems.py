"""Writes the message for a recipe or group file whose values do not fit the schema."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf.errors import GrammarParseError

from rlhf.config.known_settings import SECTIONS, SETTINGS, setting_of
from rlhf.config.library import Library
from rlhf.config.names.hints import hint, syntax_hint
from rlhf.errors import did_you_mean, nearest

GLOBAL_PACKAGE = "# @package _global_"


def composition_problem(error: Exception, choices: list[str], library: Library) -> str:
    """Return the message for an error of Hydra, with the file, the key and the value if they are known."""
    cause = error.__cause__ or error.__context__
    named = re.match(r"In '(?:(.*)/)?([^/']+)': ", str(error))
    group, name = named.groups() if named else (None, None)
    path = library.entries(group).get(name) if group and name else None
    where = f"{path or ' '.join(choices)}: "
    key = getattr(cause, "full_key", None) or ""
    reason = str(cause or str(error)[named.end() if named else 0 :]).splitlines()[0]
    if unknown := re.search(r"Could not override '(\w+)'", str(error)):
        return where + _no_group(unknown[1], library)
    if key == "recipes":
        return f"{where}the first line of a recipe must be `{GLOBAL_PACKAGE}`."
    if isinstance(cause, GrammarParseError):
        return f"{where}{key}={cause.value}: {reason}."
    written = dict(_written(path, group or "")) if path else {}
    if section := next((each for each in written if each in SECTIONS), None):
        inside = next(each for each in SETTINGS if each.startswith(f"{section}.")).rpartition(".")[2]
        return (
            f"{where}{section}: {written[section]}: {section} is a section, and has no value of its own. Write its "
            f"settings below it, indented, such as `{inside}:`."
        )
    if key and key not in SECTIONS and not setting_of(key):
        return f"{where}there is no setting {key}.{hint(key)}"
    if setting_of(key) and f"Key '{key}' not in" in reason:
        section, _, leaf = key.rpartition(".")
        return f"{where}{key}: sections are nested in a recipe. Write `{leaf}:` indented below `{section}:`."
    if setting := setting_of(key):
        value = written.get(key)
        if isinstance(value, str) and setting.expects.startswith("a list"):
            return f"{where}{key}: {value}: must be {setting.expects}. Write `{key.rpartition('.')[2]}: [{value}]`."
        return f"{where}{key}: {reason}; must be {setting.expects}.{syntax_hint(setting, value)}"
    return f"{where}{reason}"


def _written(path: Path, group: str) -> Iterator[tuple[str, Any]]:
    """Yield the values in a recipe or group file by dotted key: all settings, and sections that have a value."""
    text = path.read_text(encoding="utf-8")
    yield from _values(yaml.safe_load(text), "" if GLOBAL_PACKAGE in text else f"{group}.")


def _values(tree: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items() if isinstance(tree, Mapping) else ():
        key = f"{prefix}{name}"
        if key in SECTIONS and isinstance(value, Mapping):
            yield from _values(value, f"{key}.")
        elif key in SECTIONS or key in SETTINGS:
            yield key, value


def _no_group(name: str, library: Library) -> str:
    if name in SECTIONS:
        return f"{name} is a section without entries to choose from: remove `override /{name}`, and set its settings."
    groups = library.groups
    return f"there is no group {name}.{did_you_mean(nearest(name, groups))} Choices: {', '.join(groups)}."
