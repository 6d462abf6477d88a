"""Keeps secrets in settings out of stored configurations, trackers and messages."""

import os
import re
from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar
from zlib import crc32

from rlhf.config.redaction import (
    LOGIN,
    REDACTED,
    SECRET,
    SECRET_NAME,
    has_secret,
    names_secret,
    without_queries,
    without_variables,
)

T = TypeVar("T")
_QUERY = re.compile(r"(\S+://\S+\?)(\S+)")
_INTERPOLATION = re.compile(r"(?<!\\)(?:\\\\)*\$\{")
"""Matches the start of an interpolation: `${` after an even number of backslashes. An odd number escapes it."""
_LITERAL_QUERY = re.compile(r"([^?]*://[^?]*\?).*=[^&$]")
_ASSIGNMENT = re.compile(r"-*([\w.-]+)\s*[:=]\s*(\S.*)", re.DOTALL)
_PAIR = re.compile(r"([\w.-]+)=([^\s;&]+)")
_OPTION = re.compile(r"-+([\w.-]+)")
_ENVIRONMENT = re.compile(r"\$\{oc\.env:\s*(\w+)")


class Hidden(str):
    """A secret value. Files contain `text` instead, an interpolation that every start resolves to the value again.

    If the user typed the secret itself, `text` reads an environment variable: `variable` is its name and value.
    """

    text: str
    variable: tuple[str, str] | None

    def __new__(cls, value: str, text: str = "", variable: tuple[str, str] | None = None) -> "Hidden":
        made = super().__new__(cls, value)
        made.text, made.variable = text, variable
        return made

    def __repr__(self) -> str:
        return repr(self.text)


def hide(value: T, raw: Any, path: str = "RLHF", *, free: bool = False) -> T:
    """Return a resolved configuration with each secret as `Hidden`. Dataclasses change in place.

    Secrets are:
    - in free mappings (with the user's own keys, such as `reward.kwargs`): interpolations, texts under a key such as
      `api_key`, texts that look like a token, `NAME: VALUE` with such a key, texts with `NAME=VALUE`, and the value
      after an option such as `--api-key`;
    - elsewhere: interpolations of environment variables, if the value is a URL or a variable is called
      `..._TOKEN` or similar;
    - everywhere: logins and queries of URLs, and settings that the schema declares as secret.

    Args:
        raw: the configuration as plain containers, before interpolations are resolved.
        path: prefix of the names of environment variables.
        free: whether `value` is in a free mapping.
    """
    found: Any = value
    if is_dataclass(value):
        for field in fields(value):
            name, kept = f"{path}.{field.name}", getattr(value, field.name)
            item = hide(kept, _item(raw, field.name), name, free=field.metadata.get("secret", False))
            if field.metadata.get("secret") and isinstance(item, str) and item and not isinstance(item, Hidden):
                item = Hidden(item, f"${{oc.env:{_variable(name)}}}", (_variable(name), item))
            setattr(value, field.name, item)
    elif isinstance(value, dict):
        found = {key: hide(item, _item(raw, key), f"{path}.{key}", free=True) for key, item in value.items()}
    elif isinstance(value, list):
        named = [f"{path}{_option(before)}.{at}" for at, before in enumerate([None, *value[:-1]])]
        found = [hide(item, _item(raw, at), named[at], free=free) for at, item in enumerate(value)]
    elif isinstance(value, str):
        found = _from_text(value, raw, path, free) if _is_interpolated(raw) else _typed(value, path, free)
    return found


def _option(before: Any) -> str:
    """Return the path suffix of a list item after the option `before`, such as `.api-key`; empty after other items."""
    option = _OPTION.fullmatch(before) if isinstance(before, str) else None
    return f".{option[1]}" if option and names_secret(option[1]) else ""


def _item(raw: Any, key: Any) -> Any:
    try:
        return None if isinstance(raw, str) else raw[key]
    except (KeyError, IndexError, TypeError):  # an interpolation stands for the whole mapping
        return None


def _is_interpolated(raw: Any) -> bool:
    return isinstance(raw, str) and _INTERPOLATION.search(raw) is not None


def interpolates(value: Any) -> bool:
    """Return whether a plain value has an interpolation, also inside mappings and lists."""
    if isinstance(value, dict | list):
        return any(map(interpolates, value.values() if isinstance(value, dict) else value))
    return _is_interpolated(value)


def _from_text(value: str, text: str, path: str, free: bool) -> str:
    variables = _ENVIRONMENT.findall(text)
    if not (free or (variables and ("://" in value or any(names_secret(name, SECRET_NAME) for name in variables)))):
        return _typed(value, path, free)
    if query := _LITERAL_QUERY.match(text):
        variable = _variable(path)
        return Hidden(value, f"{query[1]}${{oc.env:{variable}}}", (variable, value.partition("?")[2]))
    literal = without_variables(text)
    if (free and SECRET.search(literal)) or LOGIN.search(literal):
        return Hidden(value, f"${{oc.env:{_variable(path)}}}", (_variable(path), value))
    return Hidden(value, text)


def _variable(path: str) -> str:
    # Add a checksum, so that keys such as `api-key` and `api_key` get different names.
    return f"{re.sub(r'[^A-Z0-9]', '_', path.upper())}_{crc32(path.encode()):08X}_SECRET"


def _typed(value: str, path: str, free: bool) -> str:
    variable = _variable(path)
    pairs = [*((part, value) for part in path.split(".")), *_PAIR.findall(value)]
    if whole := _ASSIGNMENT.fullmatch(value):
        pairs.append(whole.groups())
    named = any(has_secret(*pair) for pair in pairs)
    if value and ((free and (named or SECRET.search(value))) or LOGIN.search(value)):
        return Hidden(value, f"${{oc.env:{variable}}}", (variable, value))
    if query := _QUERY.fullmatch(value):
        return Hidden(value, f"{_escaped(query[1])}${{oc.env:{variable}}}", (variable, query[2]))
    if free and without_queries(value) != value:
        return Hidden(value, f"${{oc.env:{variable}}}", (variable, value))
    return value


def export(config: object) -> None:
    """Set the environment variables from which the processes of a run read the secrets that the user typed."""
    os.environ.update(variable for _, variable in typed_secrets(config))


def typed_secrets(config: object) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield the setting of each secret that the user typed, and the name and value of its environment variable."""
    return ((setting, secret.variable) for setting, secret in secrets_of(config) if secret.variable is not None)


def secrets_of(value: Any, path: str = "") -> Iterator[tuple[str, Hidden]]:
    """Yield each secret in a section or setting with its dotted name, which begins with `path`."""
    if isinstance(value, Hidden):
        yield path, value
    items: Iterable[tuple[Any, Any]] = ()
    if is_dataclass(value):
        items = ((field.name, getattr(value, field.name)) for field in fields(value))
    elif isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
    for name, item in items:
        yield from secrets_of(item, f"{path}.{name}" if path else str(name))


def with_marks(typed: Any, resolved: Any, mark: str) -> Any:
    """Return the `typed` value of a setting or section with `mark` for each secret that `resolved` hides.

    Interpolations stay: they contain no secret.
    """
    if isinstance(resolved, Hidden):
        return typed if resolved.variable is None else mark
    if isinstance(typed, dict):
        return {key: with_marks(item, member(resolved, key), mark) for key, item in typed.items()}
    if isinstance(typed, list) and isinstance(resolved, list):
        return [with_marks(*pair, mark) for pair in zip(typed, resolved, strict=False)]
    return typed


def member(section: Any, key: Any) -> Any:
    """Return the value of `key` in a section or mapping; None if it has none."""
    return section.get(key) if isinstance(section, dict) else getattr(section, str(key), None)


def with_texts(value: T) -> T:
    """Return a copy of a section to write to a file: each `Hidden` becomes its `text`; other texts get `${` escaped."""
    found: Any = value
    if isinstance(value, str):
        found = value.text if isinstance(value, Hidden) else _escaped(value)
    elif isinstance(value, dict):
        found = {key: with_texts(item) for key, item in value.items()}
    elif isinstance(value, list):
        found = [with_texts(item) for item in value]
    elif is_dataclass(value):
        found = deepcopy(value)
        for field in fields(value):
            setattr(found, field.name, with_texts(getattr(value, field.name)))
    return found


def as_literals(tree: Any) -> Any:
    """Return stored containers with `${` escaped: the variables that interpolations would read may be gone."""
    if isinstance(tree, dict):
        return {key: as_literals(item) for key, item in tree.items()}
    if isinstance(tree, list):
        return [as_literals(item) for item in tree]
    return _escaped(tree) if _is_interpolated(tree) else tree


def masked(value: Any, name: str = "") -> Any:
    """Return a section or a setting as plain containers without secrets, for trackers, messages and comparisons.

    `name` is the key of `value` in a free mapping. If `name` is a secret's name, all texts in `value` are masked.
    """
    if is_dataclass(value):
        return {field.name: masked(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {key: masked(item, name if names_secret(name) else str(key)) for key, item in value.items()}
    if isinstance(value, list):
        return [masked(item, name) for item in value]
    if not isinstance(value, str):
        return value
    text = getattr(value, "text", value)
    # Check the text, not the value: a secret in a stored configuration has only its text, and must look as in
    # a new configuration.
    if has_secret(name, text):
        return REDACTED
    return text if _is_interpolated(text) else without_queries(text)


def _escaped(text: str) -> str:
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)
