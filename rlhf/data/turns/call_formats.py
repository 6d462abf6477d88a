"""Reads the calls in a turn's text, in the format of the model's family. Nothing that the policy writes is executed."""

import ast
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rlhf.data.turns import plain_calls
from rlhf.data.turns.tool_calls import (
    BROKEN_JSON,
    DECODER,
    ToolSchemas,
    Written,
    parsed_json,
    written_object,
    written_value,
)

Read = Callable[[str, ToolSchemas], tuple[str, list[Written]]]
"""Returns the text without calls, and the calls."""
_TAGGED = re.compile(r"<tool_call>(.*?)(?:(</tool_call>)|(?=<tool_call>)|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^<>\s]+)>\n?")
_PARAMETER_END = "</parameter>"
_LLAMA = re.compile(r'(<\|python_tag\|>)|\{\s*"(?:name|type)"')
_LLAMA_BETWEEN = re.compile(r"(?:\s|;|<\|python_tag\|>)*")
_MISTRAL = "[TOOL_CALLS]"
_MISTRAL_NAMED = re.compile(r"\s*([^\s\[{]+)(?:\[CALL_ID\]([^\s\[{]*))?(?:\[ARGS\])?\s*(?=\{)")
_FENCED = re.compile(r"```(?:tool_code|tool_call|json)\s*\n(.*?)(?:```|\Z)", re.DOTALL)
_GEMMA = re.compile(r'\A\s*(\{\s*"name".*|\[\s*\{\s*"name".*)\Z', re.DOTALL)


def hermes(text: str, tools: ToolSchemas) -> tuple[str, list[Written]]:
    """Read `<tool_call>{json}</tool_call>` of Hermes and Qwen, and Qwen's `<function=name>` inside the same tags."""
    calls = []
    for found in _TAGGED.finditer(text):
        body, closed = found[1], found[2]
        if not closed:
            calls.append(Written(found[0], problem="the call does not end with </tool_call>"))
        elif body.lstrip().startswith("<function="):
            calls.append(_xml_call(body, tools))
        else:
            calls.append(written_object(body.strip()))
    return _TAGGED.sub("", text).strip(), calls


def _xml_call(body: str, tools: ToolSchemas) -> Written:
    if not (function := _FUNCTION.fullmatch(body)):
        return Written(body, problem="the call does not end with </function>")
    name, schemas = function[1], tools.parameters(function[1])
    arguments = {}
    for key, value in _parameters(function[2]):
        arguments[key] = value
        if schemas.get(key, {}).get("type", "string") != "string":
            try:
                arguments[key] = parsed_json(value)
            except BROKEN_JSON as error:
                return Written(body, name, problem=f"{key} of {name} is not JSON: {error}")
    return Written(body, name, arguments)


def _parameters(text: str) -> Iterator[tuple[str, str]]:
    """Yield name and value of each parameter. A parameter without an end, and all after it, are left out."""
    at = 0
    # One regular expression for start and end would search the text for a missing end again from every start.
    while (start := _PARAMETER.search(text, at)) and (end := text.find(_PARAMETER_END, start.end())) >= 0:
        yield start[1], text[start.end() : end].removesuffix("\n")
        at = end + len(_PARAMETER_END)


def llama3(text: str, tools: ToolSchemas) -> tuple[str, list[Written]]:
    """Read Llama's calls: `{"name": ..., "parameters": {...}}`, separated by semicolons or `<|python_tag|>`."""
    body = text.strip()
    if not (first := _LLAMA.match(body) or re.search(r"<\|python_tag\|>", body)):
        return body, []
    before, calls, at = body[: first.start()].strip(), list[Written](), first.start()
    while (at := (_LLAMA_BETWEEN.match(body, at) or first).end()) < len(body):
        try:
            value, end = DECODER.raw_decode(body, at)
        except BROKEN_JSON as error:
            return before, [*calls, Written(body[at:], problem=f"the call is not JSON: {error}")]
        calls.append(written_value(body[at:end], value, ("parameters", "arguments")))
        at = end
    return before, calls


def mistral(text: str, tools: ToolSchemas) -> tuple[str, list[Written]]:
    """Read `[TOOL_CALLS]` with a JSON list of calls, or newer models' `[TOOL_CALLS]name[ARGS]{...}` for each call."""
    before, *parts = text.split(_MISTRAL)
    calls = list[Written]()
    for part in (part.strip() for part in parts):
        if named := _MISTRAL_NAMED.match(part):
            calls.append(_named_call(part, named))
            continue
        try:
            values = parsed_json(part)
        except BROKEN_JSON as error:
            calls.append(Written(part, problem=f"the text after {_MISTRAL} is not JSON: {error}"))
            continue
        for value in values if isinstance(values, list) else [values]:
            calls.append(written_value(json.dumps(value, ensure_ascii=False), value))
    return before.strip(), calls


def _named_call(part: str, named: re.Match[str]) -> Written:
    try:
        return Written(part, named[1], parsed_json(part[named.end() :]), None, named[2])
    except BROKEN_JSON as error:
        return Written(part, named[1], problem=f"the arguments of {named[1]} are not JSON: {error}")


def gemma(text: str, tools: ToolSchemas) -> tuple[str, list[Written]]:
    """Read fenced tool_code or JSON, or an answer that is JSON. tool_code may also be Python calls with literals."""
    if bare := _GEMMA.match(text):
        return "", _json_or_python(bare[1].strip(), tools)
    calls = []
    for found in _FENCED.finditer(text):
        if not found[0].startswith("```json") or '"name"' in found[1]:
            calls += _json_or_python(found[1].strip(), tools)
    return (_FENCED.sub("", text) if calls else text).strip(), calls


def _json_or_python(code: str, tools: ToolSchemas) -> list[Written]:
    try:
        values = parsed_json(code)
    except BROKEN_JSON as error:
        if code.startswith(("{", '[{"', '[ {"')):
            return [Written(code, problem=f"the call is not JSON: {error}")]
        return _python_calls(code, tools)
    return [written_value(code, value) for value in (values if isinstance(values, list) else [values])]


def _python_calls(code: str, tools: ToolSchemas) -> list[Written]:
    """Read calls such as `name(3, key="x")`, also inside `print(...)` or a list, from the code's syntax tree."""
    try:
        body = ast.parse(code).body
        nodes = [node.value if isinstance(node, ast.Expr | ast.Assign) else node for node in body]
        items = [item for node in nodes for item in (node.elts if isinstance(node, ast.List) else [node])]
        calls = [_python_call(_printed(item), tools) for item in items]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return [Written(code, problem=f"the code is not a call: {error}")]
    return calls or [Written(code, problem="the code block has no call")]


def _printed(node: ast.AST) -> ast.AST:
    """Return the argument of `print`, or the node itself."""
    printed = isinstance(node, ast.Call) and ast.unparse(node.func) == "print" and len(node.args) == 1
    return node.args[0] if printed and isinstance(node, ast.Call) else node


def _python_call(node: ast.AST, tools: ToolSchemas) -> Written:
    text = ast.unparse(node)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return Written(text, problem=f"{text[:80]} is not a call of a tool")
    name, parameters = node.func.id, list(tools.parameters(node.func.id))
    if len(node.args) > len(parameters) and name in tools.functions:
        return Written(text, name, problem=f"{name} has {len(parameters)} parameters, not {len(node.args)}")
    try:
        arguments = {key: ast.literal_eval(value) for key, value in zip(parameters, node.args, strict=False)}
        arguments |= {str(each.arg): ast.literal_eval(each.value) for each in node.keywords}
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return Written(text, name, problem=f"the arguments of {name} must be literals")
    try:
        json.dumps(arguments)
    except (TypeError, ValueError, RecursionError):
        return Written(text, name, problem=f"the arguments of {name} must be values that JSON has")
    return Written(text, name, arguments)


@dataclass(frozen=True)
class CallFormat:
    """A model family's format: `read` reads the calls in a text, `thoughts` are the marks around thoughts."""

    name: str
    read: Read
    thoughts: tuple[str, str] = ("<think>", "</think>")


FORMATS = {
    each.name: each
    for each in (
        CallFormat("hermes", hermes),
        CallFormat("llama3", llama3),
        CallFormat("mistral", mistral, ("[THINK]", "[/THINK]")),
        CallFormat("gemma", gemma),
        CallFormat("plain", plain_calls.plain_calls),
    )
}
"""All formats but harmony, whose channels `rlhf/data/turns/harmony.py` reads."""


def split_thoughts(text: str, marks: tuple[str, str], opened: bool) -> tuple[str, str]:
    """Return thoughts and the rest. `opened`: the generation prompt has already opened the thoughts.

    Thoughts without an end reach to the end of the text.
    """
    opening, closing = marks
    before, found, after = text.partition(closing)
    if found and (opened or opening in before):
        start, _, inner = before.partition(opening) if opening in before else ("", "", before)
        return inner.strip(), start + after
    if opened:
        return text.strip(), ""
    start, found, inner = text.partition(opening)
    return (inner.strip(), start) if found else ("", text)
