"""The schema as a flat list of dotted settings, for the checks, the resume comparison and the messages about typos."""

import difflib
import types
import typing
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from rlhf.config import Config
from rlhf.config.other_names import PREFIXES, SETTINGS_OF_OTHERS, VALUES_OF_OTHERS
from rlhf.config.other_remarks import OWN_FUNCTION, OWN_RECIPE, REMARKS, REMARKS_ON_VALUES
from rlhf.errors import did_you_mean, nearest


@dataclass(frozen=True)
class Setting:
    """One leaf of the schema: `actor.optim.lr`, its annotated type and the rules of `schema.fields.setting`."""

    key: str
    type: Any
    metadata: Mapping[str, Any]

    def value(self, config: Config) -> Any:
        """The value of this setting in `config`."""
        value: Any = config
        for name in self.key.split("."):
            value = getattr(value, name)
        return value

    def takes_for_true(self, value: Any) -> bool:
        """Whether the setting is true or false and `value` another number, which OmegaConf takes for true."""
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and value not in (0, 1) and self.expects in ("true or false", "true or false or null")

    @property
    def expects(self) -> str:
        """The type in words, for messages."""
        return _in_words(self.type)


def _in_words(kind: Any) -> str:
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return " or ".join(_in_words(a) for a in arguments)
    if typing.get_origin(kind) is list:
        item = {float: "[0.9, 0.95]"}.get(arguments[0], "[a, b]")
        return f"a list such as {item}"
    if typing.get_origin(kind) is dict:
        return "a mapping such as {a: 1, b: 2}"
    plain = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", type(None): "null"}
    return plain.get(kind, "a value")


def _walk(section: type, prefix: str) -> Iterator[tuple[str, Setting | None]]:
    hints = typing.get_type_hints(section)
    for field in fields(section):
        key, kind = prefix + field.name, hints[field.name]
        if is_dataclass(kind):
            yield key, None
            yield from _walk(typing.cast(type, kind), key + ".")
        else:
            yield key, Setting(key, kind, field.metadata)


_NODES = dict(_walk(Config, ""))
SETTINGS: dict[str, Setting] = {key: leaf for key, leaf in _NODES.items() if leaf is not None}
SECTIONS = frozenset(key for key, leaf in _NODES.items() if leaf is None)


def setting_of(key: str) -> Setting | None:
    """The setting that `key` names, or the free mapping (`data.reasoning_gym.config`) that it lies in."""
    if key in SETTINGS:
        return SETTINGS[key]
    parents = (SETTINGS.get(key[:i]) for i, c in enumerate(key) if c == ".")
    return next((p for p in parents if p is not None and typing.get_origin(p.type) is dict), None)


def hint(key: str) -> str:
    """The end of a message about a wrong dotted key: what is said of a name that other trainers have, or the setting
    (or group) that is meant; empty when nothing is near."""
    said = remark(key)
    return f" {said}" if said else did_you_mean(nearest_setting(key))


def remark(key: str) -> str | None:
    """Sentence about a name that other trainers have and that stands for no one setting of ours."""
    return REMARKS.get(key) or REMARKS.get(_without_prefix(key))


def nearest_setting(key: str) -> str | None:
    """The setting (or group) that a wrong dotted key most likely means: another trainer's, the same name elsewhere,
    then a similar one."""
    own = _without_prefix(key)
    if found := SETTINGS_OF_OTHERS.get(key) or SETTINGS_OF_OTHERS.get(own):
        return found
    if setting_of(own) or own in SECTIONS:
        return own
    section, _, name = own.rpartition(".")
    if same := [k for k in SETTINGS if k.rpartition(".")[2] == name]:
        return max(same, key=lambda k: difflib.SequenceMatcher(None, own, k).ratio())
    if elsewhere := SETTINGS_OF_OTHERS.get(name):  # a name of others', written into the section where it belongs
        for candidate in (f"{section}.{elsewhere.rpartition('.')[2]}", elsewhere):
            if setting_of(candidate) and candidate.partition(".")[0] == section.partition(".")[0]:
                return candidate
    if section in SECTIONS:
        found = nearest(name, [k.rpartition(".")[2] for k in SETTINGS if k.rpartition(".")[0] == section])
        return f"{section}.{found}" if found else None
    return nearest(own, [*SETTINGS, *SECTIONS])


def _without_prefix(key: str) -> str:
    return next((key.removeprefix(p) for p in PREFIXES if key.startswith(p)), key)


def meant(value: str, choices: Collection[str]) -> str | None:
    """The choice that a wrong value most likely means: what another trainer calls so, else a similar word."""
    if value in VALUES_OF_OTHERS:
        return VALUES_OF_OTHERS[value] if VALUES_OF_OTHERS[value] in choices else None
    return nearest(value, choices)


def value_hint(key: str, value: str, choices: Collection[str]) -> str:
    """The end of a message about a value that is none of the setting's choices: what is said of it, or the choice that
    is meant; empty when nothing is near."""
    said = REMARKS_ON_VALUES.get((key, value))
    return f" {said}" if said else did_you_mean(meant(value, choices))


def form_hint(setting: Setting, value: Any) -> str:
    """The end of a message about a value of another type than the setting's: how what is meant is written here."""
    if not isinstance(value, str):
        return ""
    if setting.expects.startswith("a list"):
        return f" Write '{setting.key}=[{value}]'."
    bounds = value.split("_")
    if f"{setting.key}_lower" in SETTINGS and len(bounds) == 2:  # verl's text of two bounds
        return f" Write {setting.key}_lower={bounds[0]} {setting.key}={bounds[1]}."
    return ""


def instead(group: str, value: str, known: Collection[str]) -> str:
    """The end of a message about a value that the group of that name, with these entries, does not have: the override
    that was meant, or what such values are written as."""
    if found := setting_instead(group, value):
        return did_you_mean(found)
    if said := value_hint(group, value, known):
        return said
    if group == "model" and value[0].isalnum() and value != "null":
        return f" A folder or a Hub name is written model.path={value}."
    if group == "reward":
        return f" {OWN_FUNCTION.replace('Write', 'A function of yours is written')}"
    return f" {OWN_RECIPE}" if group == "recipes" and value.endswith((".yaml", ".yml")) else ""


def setting_instead(group: str, value: str) -> str | None:
    """Override for a value that was given to the group of that name: a model's folder, a file of data, a function."""
    if group == "model" and "/" in value:
        return f"model.path={value}"
    if group == "data" and ("/" in value or "." in value):
        return f"data.train_files={value}"
    if group == "reward" and ":" in value:
        return f"'reward.functions=[{value}]'"
    return None
