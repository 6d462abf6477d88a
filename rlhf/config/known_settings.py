"""Flattens the schema into dotted settings, for checks and the resume comparison."""

import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from operator import attrgetter
from typing import Any

from rlhf.config import Config


@dataclass(frozen=True)
class Setting:
    """One leaf of the schema, e.g. `actor.optim.lr`, with its type and the rules of `schema.fields.setting`."""

    key: str
    type: Any
    metadata: Mapping[str, Any]

    def value(self, config: Config) -> Any:
        return attrgetter(self.key)(config)

    @property
    def default(self) -> Any:
        return self.value(_DEFAULTS)

    def reads_as_true(self, value: Any) -> bool:
        """Return whether this setting is boolean and `value` is a number other than 0 and 1, which OmegaConf reads as
        true."""
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and value not in (0, 1) and self.expects in ("true or false", "true or false or null")

    @property
    def expects(self) -> str:
        """Return the type of the setting in words, for messages."""
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
    plain = {int: "a whole number", float: "a number", bool: "true or false", str: "a string", type(None): "null"}
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


_DEFAULTS = Config()
_NODES = dict(_walk(Config, ""))
SETTINGS: dict[str, Setting] = {key: leaf for key, leaf in _NODES.items() if leaf is not None}
SECTIONS = frozenset(key for key, leaf in _NODES.items() if leaf is None)


def setting_of(key: str) -> Setting | None:
    """Return the setting `key`, or the mapping setting (e.g. `reward.kwargs`) that has `key` as an entry; else None."""
    if key in SETTINGS:
        return SETTINGS[key]
    parents = (SETTINGS.get(key[:i]) for i, c in enumerate(key) if c == ".")
    return next((p for p in parents if p is not None and typing.get_origin(p.type) is dict), None)
