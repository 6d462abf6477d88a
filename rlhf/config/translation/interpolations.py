"""Resolves references between the settings of a YAML file. Does not resolve references to environment variables."""

import re
from collections.abc import Mapping
from typing import Any

import yaml

from rlhf.config.stored import parse_yaml
from rlhf.errors import UserError

_INNERMOST = re.compile(r"(?<!\\)\$\{([^${}]*)\}")
_REFERENCE = re.compile(r"(\.*)(\w[\w.\[\]-]*)")
_SELECT = re.compile(r"oc\.select:\s*([^,\s]+)\s*(?:,(.*))?", re.DOTALL)
_LONGEST = 1_000_000
_MISSING = object()
_UNFINISHED = object()


class Interpolations:
    """Replaces `${a.b}`, `${.b}` and `${oc.select:a.b,DEFAULT}` by values of `tree`.

    Keeps all other interpolations: `${oc.env:...}` may read a secret, and a reference may lead to another file.
    OmegaConf's resolver reads the environment, and its time grows exponentially with the depth of references.
    """

    def __init__(self, tree: Mapping[Any, Any]) -> None:
        self._tree = tree
        self._resolved: dict[tuple[str, ...], Any] = {}
        self._length = 0

    def resolve(self, value: Any, place: tuple[str, ...]) -> Any:
        """Return `value`, whose keys are `place`, with its interpolations resolved, also inside lists and mappings.

        Inside a list or mapping, a reference to another list or mapping is kept: values that contain each other grow
        exponentially with their depth.

        Raises:
            UserError: the resolved texts have over a million characters.
            RecursionError: the chain of references is too long.
        """
        if isinstance(value, str):
            return self._resolve_text(value, place) if "${" in value else value
        if isinstance(value, list):
            return [self._resolve_item(item, (*place, str(number))) for number, item in enumerate(value)]
        if isinstance(value, dict):
            return {key: self._resolve_item(item, (*place, str(key))) for key, item in value.items()}
        return value

    def _resolve_item(self, item: Any, place: tuple[str, ...]) -> Any:
        value = self.resolve(item, place)
        if isinstance(item, str) and isinstance(value, list | dict):
            return item
        if isinstance(value, str) and value is not item:
            self._count(value)
        return value

    def _resolve_text(self, text: str, place: tuple[str, ...]) -> Any:
        while True:
            whole = _INNERMOST.fullmatch(text)
            if whole and (value := self._value(whole[1], place)) is not _MISSING:
                return value
            new = _INNERMOST.sub(lambda match: self._inside(match[1], place), text)
            self._count(new)
            if new == text:
                return re.sub("[\0\1]", lambda mark: "${" if mark[0] == "\0" else "}", text)
            text = new

    def _count(self, text: str) -> None:
        self._length += len(text)
        if self._length > _LONGEST:
            raise UserError(f"the interpolations expand to over {_LONGEST} characters. Write out their values.")

    def _inside(self, body: str, place: tuple[str, ...]) -> str:
        """Return the text that replaces an interpolation inside a longer text, with marks instead of `${` and `}`.

        The marks prevent the next round of `_resolve_text` from resolving the result again.
        """
        value = self._value(body, place)
        kept = value is _MISSING or isinstance(value, dict | list)
        return f"\0{body}\1" if kept else str(value).replace("${", "\0").replace("}", "\1")

    def _value(self, body: str, place: tuple[str, ...]) -> Any:
        """Return the value of the interpolation `body`, or _MISSING if the interpolation must stay."""
        if (reference := _REFERENCE.fullmatch(body)) is not None:
            return self._at(reference, place)
        if (select := _SELECT.fullmatch(body)) is None or (reference := _REFERENCE.fullmatch(select[1])) is None:
            return _MISSING
        value = self._at(reference, place)
        if value is not _MISSING or select[2] is None or "\0" in select[2]:
            return value
        try:
            return parse_yaml(select[2])
        except yaml.YAMLError:
            return select[2].strip()

    def _at(self, reference: re.Match[str], place: tuple[str, ...]) -> Any:
        dots = len(reference[1])
        keys = (*(place[:-dots] if dots else ()), *re.split(r"[.\[\]]+", reference[2].rstrip("]")))
        if keys in self._resolved:
            found = self._resolved[keys]
            return _MISSING if found is _UNFINISHED else found
        found = self._tree
        for key in keys:
            if isinstance(found, Mapping):
                found = found.get(key, _MISSING)
            else:
                inside = isinstance(found, list) and key.isdecimal() and int(key) < len(found)
                found = found[int(key)] if inside else _MISSING
        if isinstance(found, str | list | dict):
            self._resolved[keys] = _UNFINISHED  # a reference to itself is kept
            found = self.resolve(found, keys)
        self._resolved[keys] = found
        return found
