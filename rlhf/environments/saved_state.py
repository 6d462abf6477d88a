"""Saves and restores an environment object: with its own `state_dict`, or with its attributes if they are plain values.

Plain values are None, bool, int, float, str, lists, tuples and dicts of these with keys of type str, and
`random.Random`. The state is JSON, so that loading it executes no code. An object with other attributes cannot be
saved. Neither can an object that refers twice to the same list or dict, or whose attributes exceed `MOST_BYTES` or
`typed_json.MOST_LEVELS`.
"""

import json
import random
from enum import Enum
from typing import Any

from rlhf import typed_json

TUPLE, RANDOM = "__tuple__", "__random__"
MOST_BYTES = 1 << 20
"""Largest size of saved attributes, because each reply carries them, and of a `state_dict`'s result."""
_LONGEST_INT = 10_000
"""Bits of the largest integer to save. Python writes no integer of more than 4,300 digits as text."""
_HEAP_TYPE = 1 << 9
"""CPython's flag of classes that Python code defines. Other classes may store values outside of `__dict__`."""


class _NotPlainError(Exception):
    pass


def saved(environment: Any, *, attributes: bool = True) -> dict[str, Any] | None:
    """Return the object's state as JSON values, or None if it cannot be saved without loss.

    `attributes`: save the attributes of an object that has no `state_dict`.

    Raises:
        TypeError: `state_dict` returns values that JSON lacks, or JSON of more than `MOST_BYTES` or `MOST_LEVELS`.
    """
    if callable(getattr(environment, "state_dict", None)):
        state = environment.state_dict()
        try:
            text = typed_json.dumps(state)
            too_deep = typed_json.is_deep(state)
        except RecursionError:
            too_deep = True
        if too_deep:
            raise TypeError(f"state_dict returned more than {typed_json.MOST_LEVELS} levels of lists and dicts")
        if not _same(typed_json.loads(text), state):
            raise TypeError(
                "state_dict must return texts, numbers, lists and dicts, which JSON keeps: no NaN, no tuples, no other "
                "objects, no subclasses such as Counter, and keys of type str"
            )
        if len(text) > MOST_BYTES:
            raise TypeError(
                f"state_dict returned {len(text)} bytes of JSON, at most {MOST_BYTES} are allowed: the trainer "
                "saves the state after each call. Return only what changes in an episode, and load tables in __init__."
            )
        return {"own": typed_json.plain(state)}
    kinds = [kind for kind in type(environment).__mro__ if kind is not object]
    if not attributes or any("__slots__" in vars(kind) or not kind.__flags__ & _HEAP_TYPE for kind in kinds):
        return None
    try:
        encoded = _Encoder().encoded(vars(environment))
    except (_NotPlainError, RecursionError):  # nested too deep
        return None
    return None if typed_json.is_deep(encoded) else {"attributes": encoded}


def _same(decoded: Any, value: Any) -> bool:
    """Return whether `decoded` can replace `value`: a `Counter` is equal to a dict, but has more methods.

    NumPy's float64 and other subclasses of numbers and texts lose only their methods. Rejecting them would end runs.
    """
    is_plain = isinstance(value, int | float | str) and not isinstance(value, bool | Enum)
    if type(decoded) is not type(value) and not (is_plain and isinstance(value, type(decoded))):
        return False
    if isinstance(decoded, dict):
        pairs = zip(decoded.items(), value.items(), strict=False)
        return len(decoded) == len(value) and all(_same(key, k) and _same(v, w) for (key, v), (k, w) in pairs)
    if isinstance(decoded, list):
        return len(decoded) == len(value) and all(map(_same, decoded, value))
    return bool(decoded == value)


def restore(environment: Any, state: dict[str, Any]) -> None:
    """Give a new object the state that `saved` returned."""
    if "own" in state:
        environment.load_state_dict(typed_json.loads(json.dumps(state["own"])))
    else:
        vars(environment).clear()
        vars(environment).update(_decoded(state["attributes"]))


class _Encoder:
    """Encodes the attributes of one object."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._left = MOST_BYTES

    def encoded(self, value: Any) -> Any:
        """Return the value as JSON values; raise _NotPlainError if it is not plain or too large."""
        kind = type(value)
        self._left -= 1 + (len(value) if kind is str else 0)
        if self._left < 0:
            raise _NotPlainError
        if kind is int and value.bit_length() > _LONGEST_INT:
            raise _NotPlainError
        if value is None or kind in (bool, int, float, str):
            return value
        if kind is not tuple:
            if id(value) in self._seen:  # two references to one object would become two objects
                raise _NotPlainError
            self._seen.add(id(value))
        if kind is list:
            return [self.encoded(each) for each in value]
        if kind is tuple:
            return {TUPLE: [self.encoded(each) for each in value]}
        if kind is dict and all(type(key) is str for key in value) and not {TUPLE, RANDOM} & value.keys():
            return {key: self.encoded(each) for key, each in value.items()}
        if kind is random.Random:
            return {RANDOM: self.encoded(value.getstate())}
        raise _NotPlainError


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(each) for each in value]
    if not isinstance(value, dict):
        return value
    if TUPLE in value:
        return tuple(_decoded(each) for each in value[TUPLE])
    if RANDOM in value:
        generator = random.Random()
        generator.setstate(_decoded(value[RANDOM]))
        return generator
    return {key: _decoded(each) for key, each in value.items()}
