"""Sends the values of data rows between processes as JSON: dates, times, decimals and bytes arrive with their types."""

import json
from base64 import b64decode, b64encode
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

_TYPE, _VALUE = "__type__", "value"
_KINDS: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "datetime": (datetime, lambda value: value.isoformat(), datetime.fromisoformat),
    "date": (date, lambda value: value.isoformat(), date.fromisoformat),
    "time": (time, lambda value: value.isoformat(), time.fromisoformat),
    "timedelta": (timedelta, lambda value: [value.days, value.seconds, value.microseconds], lambda v: timedelta(*v)),
    "decimal": (Decimal, str, Decimal),
    "bytes": (bytes, lambda value: b64encode(value).decode(), b64decode),
}
"""Maps a name to a type, its encoder and its decoder. A datetime is a date, too, so it comes first."""
_DICT = "dict"
MOST_LEVELS = 100
"""Most levels of lists and dicts in JSON of users' code. Python's recursion limit would end the rank at about 470."""


def dumps(value: Any) -> str:
    """Return `value` as one line of JSON. A value of a type that neither JSON nor `_KINDS` has becomes `str(value)`."""
    return json.dumps(plain(value))


def loads(text: str | bytes) -> Any:
    """Return the value that `dumps` encoded."""
    return json.loads(text, object_hook=_decoded)


def plain(value: Any) -> Any:
    """Return `value` in JSON's types, such that `loads` restores the types of `_KINDS`."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        found = {key: plain(each) for key, each in value.items()}
        # A dict that looks like an encoded value is sent as pairs.
        return {_TYPE: _DICT, _VALUE: [[key, each] for key, each in found.items()]} if _TYPE in found else found
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, date) and value != value:  # pandas.NaT
        return None
    for name, (kind, encode, _) in _KINDS.items():
        if isinstance(value, kind):
            return {_TYPE: name, _VALUE: encode(value)}
    return str(value)


def is_deep(value: Any, most: int = MOST_LEVELS) -> bool:
    """Return whether lists and dicts are nested more than `most` levels deep."""
    inside = [value]
    for _ in range(most + 1):
        level = [each for each in inside if isinstance(each, dict | list)]
        if not level:
            return False
        inside = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    return True


def _decoded(found: dict[str, Any]) -> Any:
    if _TYPE not in found:
        return found
    return dict(found[_VALUE]) if found[_TYPE] == _DICT else _KINDS[found[_TYPE]][2](found[_VALUE])
