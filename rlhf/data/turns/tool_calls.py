"""Defines a turn of the policy and its calls, and checks the calls against the JSON schemas of the tools."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf.typed_json import is_deep

BROKEN_JSON = (ValueError, RecursionError)
"""Errors of `json.loads`: invalid JSON, a number that is too long, lists that are nested too deeply."""
NO_NAME = "unknown"
"""The name in the result of an invalid call whose own name is missing or not valid text."""
ID_LENGTH = 9
"""Characters of a call's id; Mistral's templates accept no other length."""
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


@dataclass(frozen=True)
class Written:
    """A call as the policy wrote it, before any check. `problem` is set if the call cannot be read."""

    text: str
    name: str | None = None
    arguments: Any = None
    problem: str | None = None
    id: str | None = None


@dataclass(frozen=True)
class ToolCall:
    """A call of one of the environment's tools; the arguments fit the tool's schema."""

    name: str
    arguments: dict[str, Any]
    id: str

    def result(self, content: str) -> dict[str, Any]:
        """Return the message with the tool's result."""
        return _result(self.name, self.id, content)


@dataclass(frozen=True)
class InvalidCall:
    """A call that no tool receives. The policy reads `reason` instead of a result."""

    text: str
    reason: str
    name: str
    id: str

    def result(self) -> dict[str, Any]:
        """Return the message with the reason."""
        return _result(self.name, self.id, f"error: {self.reason}")


@dataclass(frozen=True)
class Turn:
    """One turn of the policy, read from its tokens."""

    text: str
    """The answer, without thoughts, calls and special tokens."""
    thoughts: str
    actions: tuple[ToolCall | InvalidCall, ...]
    """The calls, in the order in which the policy wrote them."""
    ended: bool
    """False if the turn was cut before its last token."""

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        return tuple(action for action in self.actions if isinstance(action, ToolCall))

    @property
    def invalid(self) -> tuple[InvalidCall, ...]:
        return tuple(action for action in self.actions if isinstance(action, InvalidCall))

    def message(self) -> dict[str, Any]:
        """Return the turn, without invalid calls, as an OpenAI message for reward functions and tables of samples."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.thoughts:
            message["reasoning_content"] = self.thoughts
        if self.calls:
            message["tool_calls"] = [
                {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.calls
            ]
        return message


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value")


DECODER = json.JSONDecoder(parse_constant=_no_constant)
"""Rejects NaN and Infinity, which JSON lacks and Python accepts."""


def parsed_json(text: str) -> Any:
    """Return the value of a JSON text. Raise an error of BROKEN_JSON, also for NaN and Infinity."""
    return DECODER.decode(text)


def written_object(text: str, keys: Sequence[str] = ("arguments", "parameters")) -> Written:
    """Read `{"name": ..., "arguments": {...}}`; the arguments are under one of `keys`."""
    try:
        value = parsed_json(text)
    except BROKEN_JSON as error:
        return Written(text, problem=f"the call is not JSON: {error}")
    return written_value(text, value, keys)


def written_value(text: str, value: Any, keys: Sequence[str] = ("arguments", "parameters")) -> Written:
    """Read a call from a JSON value; `keys` as in `written_object`."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return Written(text, problem='the call is not an object {"name": ..., "arguments": {...}}')
    key = next((key for key in keys if key in value), None)
    number = value.get("id")
    return Written(text, value["name"], value[key] if key else {}, None, number if isinstance(number, str) else None)


class ToolSchemas:
    """The tools of an environment, in OpenAI's format.

    Args:
        schemas: `{"type": "function", "function": {"name", "description", "parameters": JSON schema}}` each.
    """

    def __init__(self, schemas: Sequence[Mapping[str, Any]]):
        self.functions: dict[str, Mapping[str, Any]] = {each["function"]["name"]: each["function"] for each in schemas}

    def parameters(self, name: str) -> Mapping[str, Mapping[str, Any]]:
        """Return the schemas of a tool's parameters by name; empty for an unknown tool."""
        return self.functions.get(name, {}).get("parameters", {}).get("properties", {})

    def action(self, written: Written, position: int) -> ToolCall | InvalidCall:
        """Return the checked call, or an `InvalidCall` with the reason. `position` is the call's index in its turn."""
        number = _made_id(written.text, position)
        if not _is_text([written.name, written.arguments, written.id]):
            why = "the call has half of a surrogate pair, which is not a character, or is nested too deeply"
            return InvalidCall(written.text, why, NO_NAME, number)
        number = written.id or number
        reason = written.problem or self._problem(written)
        if reason is not None or written.name is None:
            return InvalidCall(written.text, str(reason), written.name or NO_NAME, number)
        return ToolCall(written.name, written.arguments, number)

    def _problem(self, call: Written) -> str | None:
        if call.name not in self.functions:
            return f"there is no tool {call.name!r}. Tools: {', '.join(self.functions) or 'none'}"
        if not isinstance(call.arguments, dict):
            return f"the arguments of {call.name} are not an object with names and values"
        known = self.parameters(call.name)
        required = self.functions[call.name].get("parameters", {}).get("required", [])
        if missing := [name for name in required if name not in call.arguments]:
            return f"{call.name} needs {', '.join(missing)}"
        if unknown := [name for name in call.arguments if name not in known]:
            return f"{call.name} has no parameter {unknown[0]!r}. Parameters: {', '.join(known) or 'none'}"
        for name, value in call.arguments.items():
            if wanted := _wrong_type(value, known[name]):
                return f"{name} of {call.name} must be {wanted}, not {json.dumps(value, ensure_ascii=False)[:80]}"
        return None


def _wrong_type(value: Any, schema: Mapping[str, Any]) -> str | None:
    """Return what the schema allows instead of `value`, or None if `value` fits. Reads type, enum and anyOf."""
    if options := schema.get("anyOf"):
        wrong = [_wrong_type(value, option) for option in options]
        return None if None in wrong else " or ".join(map(str, wrong))
    if "enum" in schema and value not in schema["enum"]:
        return "one of " + ", ".join(json.dumps(each, ensure_ascii=False) for each in schema["enum"])
    names = schema.get("type")
    names = [names] if isinstance(names, str) else names or []
    fits = any(
        isinstance(value, _TYPES.get(name, (object,))) and (not isinstance(value, bool) or name == "boolean")
        for name in names
    )
    return None if fits or not names else " or ".join(names)


def _is_text(values: Any) -> bool:
    """Return whether a tokenizer and the process of an environment accept the values."""
    try:
        json.dumps(values, ensure_ascii=False).encode()
    except (ValueError, TypeError, RecursionError):
        return False
    return not is_deep(values)


def _made_id(text: str, position: int) -> str:
    """Return an id that depends only on the call's text and position, so that a replayed episode has equal tokens."""
    return hashlib.blake2s(f"{position} {text}".encode(errors="replace")).hexdigest()[:ID_LENGTH]


def _result(name: str, number: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "name": name, "tool_call_id": number, "content": content}
