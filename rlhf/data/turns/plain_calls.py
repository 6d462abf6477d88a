"""Reads and writes calls as `<name(arguments)>`, for tokenizers whose chat template has no tools.

A tool with one parameter, a string, receives the text between the parentheses: `<calc(12+30)>`. Any other tool receives
JSON values, by position or by name: `<move(3, fast=true)>`. `<look()>` has no arguments.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.data.turns.tool_calls import BROKEN_JSON, DECODER, ToolSchemas, Written

_START = re.compile(r"<([A-Za-z_]\w*)\(")
_NAMED = re.compile(r"\s*([A-Za-z_]\w*)\s*=(?!=)")
_END = ")>"


def plain_calls(text: str, tools: ToolSchemas) -> tuple[str, list[Written]]:
    """Return the text without the calls, and the calls."""
    rest, calls, at = [], [], 0
    while start := _START.search(text, at):
        rest.append(text[at : start.start()])
        name, body = start[1], start.end()
        if _only_text(name, tools):
            at, call = _text_call(text, start, next(iter(tools.parameters(name))))
        else:
            at, call = _json_call(text, start, list(tools.parameters(name)))
        calls.append(call)
        at = max(at, body)
    return "".join([*rest, text[at:]]), calls


def announcement(tools: ToolSchemas) -> str:
    """Return the description of the tools for the prompt."""
    lines = ["Call a tool with <name(arguments)>:"]
    for name, function in tools.functions.items():
        parameters = ", ".join(f"{key}: {schema.get('type', 'any')}" for key, schema in tools.parameters(name).items())
        lines.append(f"<{name}({parameters})> {function.get('description', '')}".rstrip())
    return "\n".join(lines)


def plain_call(name: str, arguments: Mapping[str, Any], tools: ToolSchemas) -> str:
    """Return the text of a call."""
    if _only_text(name, tools) and len(arguments) == 1:
        return f"<{name}({next(iter(arguments.values()))})>"
    values = (f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in arguments.items())
    return f"<{name}({', '.join(values)})>"


def plain_results(contents: Sequence[str]) -> str:
    """Return the results of a turn as the text of a user message."""
    return "\n".join(contents)


def _only_text(name: str, tools: ToolSchemas) -> bool:
    return [schema.get("type") for schema in tools.parameters(name).values()] == ["string"]


def _text_call(text: str, start: re.Match[str], parameter: str) -> tuple[int, Written]:
    end = text.find(_END, start.end())
    if end < 0:
        return len(text), Written(text[start.start() :], start[1], problem=f"the call does not end with {_END}")
    whole = text[start.start() : end + len(_END)]
    return end + len(_END), Written(whole, start[1], {parameter: text[start.end() : end]})


def _json_call(text: str, start: re.Match[str], parameters: list[str]) -> tuple[int, Written]:
    """Return the end of the call in `text`, and the call."""
    at, arguments, problem = start.end(), dict[str, Any](), None
    while problem is None and not text.startswith(_END, at := _blank(text, at)):
        named = _NAMED.match(text, at)
        name = named[1] if named else parameters[len(arguments)] if len(arguments) < len(parameters) else None
        try:
            value, at = DECODER.raw_decode(text, _blank(text, named.end() if named else at))
        except BROKEN_JSON:
            problem = f"the arguments of {start[1]} are not JSON values with commas between them, and {_END} at the end"
            break
        if name is None:
            problem = f"{start[1]} receives more arguments than it has parameters ({len(parameters)})"
        elif name in arguments:
            problem = f"{start[1]} receives {name} twice"
        else:
            arguments[name] = value
        at = _blank(text, at)
        at += text.startswith(",", at)
    found = text.find(_END, at)
    end = found + len(_END) if found >= 0 else len(text)
    return end, Written(text[start.start() : end], start[1], arguments, problem)


def _blank(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at
