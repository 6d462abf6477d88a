"""Saves and restores an environment object: with its own `state_dict`, or with its attributes if they are plain values.

Plain values are None, bool, int, float, str, lists, tuples and dicts of these with keys of type str, and
`random.Random`. The state is JSON, so that loading it executes no code. An object with other attributes cannot be
saved. Neither can an object that has the same list in two attributes.
"""

import json
import random
from typing import Any

TUPLE, RANDOM = "__tuple__", "__random__"
_HEAP_TYPE = 1 << 9
"""CPython's flag of classes that Python code defines. Other classes may store values outside of `__dict__`."""


class _NotPlainError(Exception):
    pass


def saved(environment: Any, *, attributes: bool = True) -> dict[str, Any] | None:
    """Return the object's state as JSON values, or None if it cannot be saved without loss.

    `attributes`: save the attributes of an object that has no `state_dict`.

    Raises:
        TypeError: `state_dict` returns values that JSON lacks.
    """
    if callable(getattr(environment, "state_dict", None)):
        state = environment.state_dict()
        if json.loads(json.dumps(state)) != state:
            raise TypeError("state_dict must return values that JSON keeps: no NaN, no tuples, and keys of type str")
        return {"own": state}
    kinds = [kind for kind in type(environment).__mro__ if kind is not object]
    if not attributes or any("__slots__" in vars(kind) or not kind.__flags__ & _HEAP_TYPE for kind in kinds):
        return None
    try:
        return {"attributes": _encoded(vars(environment), set())}
    except _NotPlainError:
        return None


def restore(environment: Any, state: dict[str, Any]) -> None:
    """Give a new object the state that `saved` returned."""
    if "own" in state:
        environment.load_state_dict(state["own"])
    else:
        vars(environment).clear()
        vars(environment).update(_decoded(state["attributes"]))


def _encoded(value: Any, seen: set[int]) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is not tuple:
        if id(value) in seen:  # two references to one object would become two objects
            raise _NotPlainError
        seen.add(id(value))
    if kind is list:
        return [_encoded(each, seen) for each in value]
    if kind is tuple:
        return {TUPLE: [_encoded(each, seen) for each in value]}
    if kind is dict and all(type(key) is str for key in value) and not {TUPLE, RANDOM} & value.keys():
        return {key: _encoded(each, seen) for key, each in value.items()}
    if kind is random.Random:
        return {RANDOM: _encoded(value.getstate(), seen)}
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
