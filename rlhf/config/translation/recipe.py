"""Builds the recipe of a translation, and keeps the other trainer's settings that are not translated yet."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from itertools import starmap
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlhf.config import Config
from rlhf.config.known_settings import SETTINGS, setting_of
from rlhf.config.names.other_trainers import other_trainers
from rlhf.config.redaction import REDACTED, Redaction, without_variables
from rlhf.config.rules.validate import out_of_bounds
from rlhf.config.secrets import hide, with_marks
from rlhf.errors import UserError
from rlhf.printable import printable

_ORDER = [section.name for section in fields(Config)]
NO_DUAL_CLIP = 1e9
"""Value of `actor.clip_ratio_c` that no ratio reaches: OpenRLHF and TRL have no dual clip by default."""
_REPLACE = "Replace it in the file, and translate again."
_LEFT_OUT = "Left out, because it runs code or gives code more rights. Read the code, then add the setting:"


def shown(name: str, value: Any) -> str:
    """Return `name=value` for a comment, without secrets."""
    secret = name in SETTINGS and SETTINGS[name].metadata["secret"]
    if secret and isinstance(value, str):
        return f"{name}={REDACTED}"
    hidden = hide(value, None, name, free=secret or name not in SETTINGS)
    return f"{name}={with_marks(value, hidden, REDACTED)}"


class Theirs:
    """The settings of another trainer that no conversion has used yet, by name. `given` has the names in the file."""

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.left = {**defaults, **values}
        self.given = frozenset(values)
        self.clashes: list[tuple[str, Any, str]] = []
        """Settings that `take` ignored: name, value, and the other name whose value `take` returned."""

    def take(self, *names: str) -> Any:
        """Remove the settings `names` and return the first value that is not None, or None.

        All names mean one setting. Values in the file override defaults.
        """
        found = {name: self.left.pop(name) for name in names if name in self.left}
        used = [name for name, value in found.items() if value is not None]
        used.sort(key=lambda name: name not in self.given)
        self.clashes += [
            (name, found[name], used[0]) for name in used[1:] if name in self.given and found[name] != found[used[0]]
        ]
        return found[used[0]] if used else None

    def drop(self, *names: str) -> list[str]:
        """Remove the settings `names` and return the names in the file whose values are not None."""
        dropped = {name: self.left.pop(name) for name in names if name in self.left}
        return [name for name, value in dropped.items() if name in self.given and value is not None]

    def number(self, *names: str, least: float | None = None) -> Any:
        """Return `take(*names)`. Raise UserError if the value is neither None nor a number of at least `least`."""
        value = self.take(*names)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise UserError(f"{names[0]}={value}: must be a number. {_REPLACE}")
        if value is not None and least is not None and value < least:
            raise UserError(f"{names[0]}={value}: must be at least {least:g}. {_REPLACE}")
        return value

    def text(self, *names: str) -> Any:
        """Return `take(*names)`. Raise UserError if the value is a list, a mapping or a number."""
        value = self.take(*names)
        if value is not None and not isinstance(value, str | bool):
            raise UserError(f"{names[0]}={value}: must be a string. {_REPLACE}")
        return value

    def texts(self, *names: str) -> list[str]:
        """Return `take(*names)` as a list of strings. Raise UserError unless it is None, a string or a list of them."""
        value = self.take(*names)
        found = [value] if isinstance(value, str) else [] if value is None else value
        if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
            raise UserError(f"{names[0]}={value}: must be a list of strings. {_REPLACE}")
        return found

    def take_section(self, prefix: str) -> list[str]:
        """Remove all settings whose names begin with `prefix` and return the names in the file."""
        return self.drop(*(name for name in self.left if name.startswith(prefix)))


@dataclass
class Recipe:
    """A recipe: entries of groups and settings, and comments about what was not translated."""

    groups: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    """Lines about settings that the recipe lacks, each with the reason or the remedy."""
    unknown: dict[str, Any] = field(default_factory=dict)
    """Settings without an equivalent here."""
    needless: list[str] = field(default_factory=list)
    """The other trainer's settings that are not needed here."""
    code: dict[str, Any] = field(default_factory=dict)
    """Settings that the recipe lacks because they run code."""

    def set(self, key: str, value: Any, name: str) -> None:
        """Set `key` to the `value` of the other trainer's `name`. A wrong or second value becomes a line in `lost`.

        Ignore None if `key` cannot be null, because other trainers write null for their default.
        """
        setting = setting_of(key)
        assert setting is not None, key
        theirs = shown(name, value)
        value = _ours(key, value)
        problem = _wrong(key, value)
        if problem is not None and value is None:
            return
        if problem is not None:
            self.lost.append(f"{theirs}: {problem}")
        elif shown(key, typed := _typed_part(value)) != f"{key}={typed}":
            self.lost.append(f"{theirs}: contains a secret. Set {key} with ${{oc.env:NAME}} instead of the secret.")
        elif key in self.settings and self.settings[key] != value:
            self.lost.append(f"{theirs}: another name has already set {shown(key, self.settings[key])}.")
        elif other := next((o for o in self.settings if key.startswith(f"{o}.") or o.startswith(f"{key}.")), None):
            self.lost.append(f"{theirs}: another name has already set {shown(other, self.settings[other])}.")
        else:
            self.settings[key] = value

    def lose(self, name: str, value: Any, why: str) -> None:
        self.lost.append(f"{shown(name, value)}: {why}")

    def as_yaml(self, head: str) -> str:
        """Return the recipe as YAML, after the comment `head`.

        Comments list what the recipe lacks: settings that run code at the top, all others at the end.
        """
        parts = ["# @package _global_\n", comment(head)]
        if code := [each for each in self.settings.get("reward.functions", []) if ":" in each]:
            parts += [comment(f"Runs code: reward.functions={code}")]
        if self.code:
            parts += [comment(_LEFT_OUT), *(comment(line, "  ") for line in _filled(starmap(shown, self.code.items())))]
        if self.groups:
            parts.append("defaults:\n")
            parts += [f"  - override /{group}: {entry}\n" for group, entry in self.groups.items()]
        tree: dict[str, Any] = {}
        for key, value in sorted(self.settings.items(), key=lambda item: _ORDER.index(item[0].partition(".")[0])):
            *sections, leaf = key.split(".")
            at = tree
            for section in sections:
                at = at.setdefault(section, {})
            at[leaf] = value
        for section, content in tree.items():
            parts.append("\n" + yaml.safe_dump({section: content}, sort_keys=False, allow_unicode=True))
        if self.lost:
            parts.append("\n# Not translated:\n")
            parts += [comment(line, "  ") for line in self.lost]
        if self.unknown:
            parts.append("\n# Without an equivalent here:\n")
            parts += [comment(line, "  ") for line in _filled(_summary(self.unknown))]
        if self.needless:
            parts.append("\n# Not needed here, because the trainer does the same by default, or in another way:\n")
            parts += [comment(line, "  ") for line in _filled(sorted(self.needless))]
        return "".join(parts)


def comment(text: str, indent: str = "") -> str:
    """Return `text` as one line of a YAML comment, with line breaks escaped and secrets redacted."""
    return f"# {indent}{printable(Redaction()(text))}\n"


def _ours(key: str, value: Any) -> Any:
    """Return our value of a setting for the other trainer's `value`, for example null or 0 for verl's -1."""
    setting, tables = setting_of(key), other_trainers()
    assert setting is not None
    if value == -1 and not isinstance(value, bool) and (meaning := tables.minus_one.get(key)):
        return None if meaning.startswith("null") else 0
    choices = setting.metadata["choices"]
    if isinstance(value, str) and choices and value not in choices and tables.values.get(value) in choices:
        return tables.values[value]
    return value


def _typed_part(value: Any) -> Any:
    """Return `value` with `without_variables` applied to its texts."""
    if isinstance(value, dict):
        return {key: _typed_part(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_typed_part(item) for item in value]
    return without_variables(value) if isinstance(value, str) else value


def _wrong(key: str, value: Any) -> str | None:
    """Return why `value` cannot be the value of `key`; None if it can."""
    setting = setting_of(key)
    assert setting is not None
    if isinstance(value, str) and "${" in value:
        return None  # the interpolation is resolved when the recipe is used
    config = _schema()
    try:
        if setting.reads_as_true(value):
            return f"{key} must be {setting.expects}."
        OmegaConf.update(config, key, value, merge=False, force_add=True)
        read = OmegaConf.select(config, key)
    except OmegaConfBaseException:
        return f"{key} must be {setting.expects}."
    return None if setting.key != key else out_of_bounds(setting, read)


@cache
def _schema() -> Any:
    """Return a configuration that rejects values of a wrong type."""
    return OmegaConf.structured(Config)


def _summary(unknown: Mapping[str, Any]) -> Iterator[str]:
    """Yield `name=value` for each setting, or `section.* (N settings)` for the settings of an unknown section."""
    known = [*SETTINGS, *other_trainers().settings]
    sections: Counter[str] = Counter()
    for name in unknown:
        parts = name.split(".")
        heads = (".".join(parts[:length]) for length in range(1, len(parts)))
        sections[next((head for head in heads if not any(k.startswith(f"{head}.") for k in known)), name)] += 1
    for section, count in sections.items():
        if section in unknown:
            yield shown(section, unknown[section])
        else:
            yield f"{section}.* ({count} setting{'s' if count > 1 else ''})"


def _filled(names: Iterable[str]) -> Iterator[str]:
    """Yield the names in lines of about 110 columns, separated by commas."""
    line = ""
    for name in names:
        if line and len(line) + len(name) > 110:
            yield f"{line},"
            line = ""
        line = f"{line}, {name}" if line else name
    if line:
        yield line
