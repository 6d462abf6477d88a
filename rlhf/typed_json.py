"""Sends the values of data rows between processes as JSON: dates, times, decimals and bytes arrive with their types."""

import json
from base64 import b64decode, b64encode
from collections.abc import Callable
from contextlib import suppress
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


def dumps(value: Any) -> str:
    """Return `value` as one line of JSON. Values of other types are sent as their text."""
    return json.dumps(value, default=_encoded)


def loads(text: str | bytes) -> Any:
    """Return the value that `dumps` encoded."""
    return json.loads(text, object_hook=_decoded)


def _encoded(value: Any) -> Any:
    for name, (kind, encode, _) in _KINDS.items():
        if isinstance(value, kind):
            return {_TYPE: name, _VALUE: encode(value)}
    return str(value)


def _decoded(found: dict[str, Any]) -> Any:
    if found.keys() == {_TYPE, _VALUE} and isinstance(name := found[_TYPE], str) and name in _KINDS:
        with suppress(ValueError, TypeError, ArithmeticError):  # a dict of the row itself may have these keys
            return _KINDS[name][2](found[_VALUE])
    return found
