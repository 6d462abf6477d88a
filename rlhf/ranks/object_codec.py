"""Encodes the objects that ranks exchange as JSON, and decodes them without running code that a message names.

A message, unlike a pickle, can only make its receiver build plain values, the trainer's own dataclasses, and exceptions
of Python and of the trainer. Imports no torch.
"""

import builtins
import importlib
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from io import BytesIO
from pathlib import Path, PosixPath
from typing import Any

_SCALARS = frozenset({type(None), bool, float, str})
_COLLECTIONS: dict[str, Callable[[list[Any]], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_LENGTH_BYTES = 8
# Integers with more bits are sent in hexadecimal: JSON's decimal digits are slow for long integers, such as bitmaps of
# files, and Python limits the number of digits.
_DECIMAL_BITS = 64


def encode(value: Any) -> bytes:
    """Return `value` as bytes: the length of a JSON text, the text, and the contents of all `bytes` in `value`.

    Raises TypeError if `value` has an object that `decode` cannot build.
    """
    contents: list[bytes] = []
    text = json.dumps(_to_json(value, contents)).encode()
    return b"".join([len(text).to_bytes(_LENGTH_BYTES, "little"), text, *contents])


def decode(message: bytes) -> Any:
    """Return an equal copy of the encoded value."""
    begin = _LENGTH_BYTES + int.from_bytes(message[:_LENGTH_BYTES], "little")
    return _from_json(json.loads(message[_LENGTH_BYTES:begin]), BytesIO(message[begin:]))


def sendable(error: Exception) -> Exception:
    """Return `error` if another rank can build it, else the same text in the nearest base class that a rank can build.

    The class matters, because all ranks must handle the error alike.
    """
    try:
        decode(encode(error))  # also try to decode: the constructor may need other arguments than the error has
        return error
    except Exception:
        text = f"{type(error).__name__}: {error}"
        for base in type(error).__mro__[1:]:
            if base not in (Exception, BaseException, object):
                try:
                    return decode(encode(base(text)))
                except Exception:
                    continue
        return RuntimeError(text)


def _to_json(value: Any, contents: list[bytes]) -> Any:
    """Return scalars and lists as they are, and every other value as a JSON object whose only key is its kind."""
    kind = type(value)
    if kind in _SCALARS or (kind is int and value.bit_length() < _DECIMAL_BITS):
        return value
    if kind is list:
        return [_to_json(each, contents) for each in value]
    if kind is dict and all(type(key) is str for key in value):
        return {"dict": {key: _to_json(each, contents) for key, each in value.items()}}
    if kind in (dict, Counter):
        return {kind.__name__: [_to_json(each, contents) for pair in value.items() for each in pair]}
    if kind in _COLLECTIONS.values():
        return {kind.__name__: [_to_json(each, contents) for each in value]}
    if kind is bytes:
        contents.append(value)
        return {"bytes": len(value)}
    if kind in (int, PosixPath):
        return {kind.__name__: hex(value) if kind is int else str(value)}
    name = [kind.__module__, kind.__qualname__]
    if isinstance(value, Exception):
        return {"error": [name, *(_to_json(each, contents) for each in _parts_of(value))]}
    if is_dataclass(kind) and _is_ours(kind.__module__):
        return {"record": [name, [_to_json(getattr(value, field), contents) for field in _fields(kind)]]}
    raise TypeError(f"cannot send an object of type {'.'.join(name)} to another rank")


def _from_json(value: Any, contents: BytesIO) -> Any:
    if type(value) is list:
        return [_from_json(each, contents) for each in value]
    if type(value) is not dict:
        return value
    [(kind, of)] = value.items()
    if type(of) is dict:
        return {key: _from_json(each, contents) for key, each in of.items()}
    if kind == "bytes":
        return contents.read(of)
    if kind in ("int", "PosixPath"):
        return int(of, 16) if kind == "int" else Path(of)
    parts = _from_json(of, contents)
    if kind in ("dict", "Counter"):
        made = dict(zip(parts[::2], parts[1::2], strict=True))
        return Counter(made) if kind == "Counter" else made
    if kind in _COLLECTIONS:
        return _COLLECTIONS[kind](parts)
    return _error(*parts) if kind == "error" else _record(*parts)


@cache
def _fields(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def _parts_of(error: Exception) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments to construct an equal error, and the error's attributes."""
    reduced = error.__reduce__()
    assert isinstance(reduced, tuple)
    return reduced[1], (reduced[2] if len(reduced) > 2 else None) or {}


def _error(name: list[str], arguments: tuple[Any, ...], attributes: dict[str, Any]) -> Exception:
    cls = _class(*name)
    if not issubclass(cls, Exception):
        raise ValueError(f"{name} is not an exception")
    made = cls(*arguments)
    made.__dict__.update(attributes)
    return made


def _record(name: list[str], values: list[Any]) -> Any:
    cls = _class(*name)
    if not is_dataclass(cls):
        raise ValueError(f"{name} is not a dataclass")
    made = object.__new__(cls)
    for field, value in zip(_fields(cls), values, strict=True):
        object.__setattr__(made, field, value)
    return made


@cache
def _class(module: str, name: str) -> type:
    """Return a class of Python's `builtins` or of the trainer. Raises ValueError for any other name."""
    found = getattr(importlib.import_module(module), name, None) if _is_ours(module) else None
    if module == builtins.__name__:
        found = getattr(builtins, name, None)
    if not isinstance(found, type):
        raise ValueError(f"{module}.{name} is not a class of Python or of the trainer")
    return found


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == __name__.partition(".")[0]
