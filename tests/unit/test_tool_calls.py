"""Tool calls in a turn: several calls, malformed calls and unknown tools, in the format of each model family."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.data.turns.call_formats import FORMATS, split_thoughts
from rlhf.data.turns.harmony import harmony
from rlhf.data.turns.tool_calls import InvalidCall, ToolCall, ToolSchemas
from tests.support.families import TOOLS, tool

SCHEMAS = ToolSchemas(TOOLS)


def actions(name: str, text: str) -> list[ToolCall | InvalidCall]:
    calls = harmony(text)[2] if name == "harmony" else FORMATS[name].read(text, SCHEMAS)[1]
    return [SCHEMAS.action(call, i) for i, call in enumerate(calls)]


def calls_of(name: str, text: str) -> list[tuple]:
    return [(each.name, each.arguments) for each in actions(name, text) if isinstance(each, ToolCall)]


ADD = ("add", {"a": 1, "b": 2})
PARAMETERS = "<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n"
XML = f"<tool_call>\n<function=add>\n{PARAMETERS}</function>\n</tool_call>"
VALID = {
    "json": ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'),
    "xml": ("hermes", XML),
    "llama": ("llama3", '{"name": "add", "parameters": {"a": 1, "b": 2}}'),
    "llama with a tag": ("llama3", '<|python_tag|>{"type": "function", "name": "add", "parameters": {"a": 1, "b": 2}}'),
    "mistral's list": ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}, "id": "a1b2c3d4e"}]'),
    "mistral's arguments": ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}'),
    "mistral's id": ("mistral", '[TOOL_CALLS]add[CALL_ID]a1b2c3d4e[ARGS]{"a": 1, "b": 2}'),
    "gemma's block": ("gemma", '```tool_code\n{"name": "add", "parameters": {"a": 1, "b": 2}}\n```'),
    "gemma's python": ("gemma", "```tool_code\nprint(add(1, b=2))\n```"),
    "gemma's answer": ("gemma", '{"name": "add", "parameters": {"a": 1, "b": 2}}'),
    "gemma's list": ("gemma", "```tool_code\n[add(a=1, b=2)]\n```"),
    "harmony": (
        "harmony",
        ' to=functions.add<|channel|>commentary <|constrain|>json<|message|>{"a": 1, "b": 2}<|call|>',
    ),
    "harmony's other order": (
        "harmony",
        '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1, "b": 2}<|call|>',
    ),
    "plain by position": ("plain", "I think <add(1, 2)>"),
    "plain by name": ("plain", "<add( b = 2,a=1 )>"),
}


@pytest.mark.parametrize("case", VALID)
def test_a_call_is_read(case):
    assert calls_of(*VALID[case]) == [ADD]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("hermes", VALID["json"][1] + "\n" + XML, [ADD, ADD]),
        ("llama3", VALID["llama"][1] + "; " + VALID["llama"][1], [ADD, ADD]),
        ("mistral", VALID["mistral's arguments"][1] * 2, [ADD, ADD]),
        ("gemma", "```tool_code\nadd(1, 2)\nsearch(query='x')\n```", [ADD, ("search", {"query": "x"})]),
        ("plain", "<add(1, 2)> and <search(a) b, c)> <look()>", [ADD, ("search", {"query": "a) b, c"}), ("look", {})]),
    ],
)
def test_several_calls(name, text, expected):
    assert calls_of(name, text) == expected


INVALID = {
    "no json": ("hermes", "<tool_call>{'name': 'add'}</tool_call>", "not JSON"),
    "no end": ("hermes", '<tool_call>{"name": "look"}', "</tool_call>"),
    "no name": ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "name"),
    "not a number": ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN, "b": 1}}</tool_call>', "NaN"),
    "unknown tool": ("hermes", '<tool_call>{"name": "open"}</tool_call>', "add, search, look"),
    "missing": ("llama3", '{"name": "add", "parameters": {"a": 1}}', "needs b"),
    "one too many": ("llama3", '{"name": "look", "parameters": {"far": true}}', "'far'"),
    "a text for a number": ("llama3", '{"name": "add", "parameters": {"a": "1", "b": 2}}', "integer"),
    "a truth value": ("llama3", '{"name": "add", "parameters": {"a": true, "b": 2}}', "integer"),
    "llama3 not a number": ("llama3", '{"name": "add", "parameters": {"a": NaN, "b": 1}}', "NaN"),
    "a list": ("llama3", '{"name": "add", "parameters": [1, 2]}', "not an object"),
    "cut": ("llama3", '{"name": "add", "parameters": {"a": 1', "not JSON"),
    "mistral": ("mistral", "[TOOL_CALLS] [{]", "not JSON"),
    "mistral's arguments": ("mistral", "[TOOL_CALLS]add[ARGS]{1", "not JSON"),
    "no literal": ("gemma", "```tool_code\nadd(1, open('x'))\n```", "literals"),
    "a statement": ("gemma", "```tool_code\nimport os\n```", "not a call"),
    "no syntax": ("gemma", "```tool_code\nadd(1,\n```", "not a call"),
    "a set": ("gemma", "```tool_code\nadd({1}, 2)\n```", "JSON"),
    "another recipient": ("harmony", " to=python<|channel|>commentary<|message|>1<|call|>", "python"),
    "harmony cut": ("harmony", ' to=functions.add<|channel|>commentary json<|message|>{"a"', "<|call|>"),
    "plain without end": ("plain", "<add(1, 2", "not JSON"),
    "plain not a number": ("plain", "<add(NaN, 2)>", "not JSON"),
    "plain twice": ("plain", "<add(1, a=2)>", "twice"),
    "plain too many": ("plain", "<add(1, 2, 3)>", "more arguments than it has parameters (2)"),
    "plain text without end": ("plain", "<search(x", ")>"),
}


@pytest.mark.parametrize("case", INVALID)
def test_an_invalid_call_says_why(case):
    name, text, reason = INVALID[case]
    (action,) = actions(name, text)
    assert isinstance(action, InvalidCall)
    assert reason in action.reason
    assert action.result()["content"] == f"error: {action.reason}"


@pytest.mark.parametrize(
    "text", ["1 < 2 (or not)>", "{x}", "[1]", "```python\nadd(1, 2)\n```", '```json\n{"a": 1}\n```']
)
@pytest.mark.parametrize("name", FORMATS)
def test_a_text_is_no_call(name, text):
    assert FORMATS[name].read(text, SCHEMAS) == (text, [])


PIECES = ["<tool_call>", "</tool_call>", "<function=add>", "</function>", "<parameter=a>", "</parameter>", "{", "}"]
PIECES += ['"name"', '"add"', ":", ",", "[", "]", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "```tool_code\n", "```"]
PIECES += [
    "<add(",
    ")>",
    "a=",
    "1",
    " to=functions.add",
    "<|channel|>",
    "<|message|>",
    "<|call|>",
    "<|start|>",
    "\n",
    "\ud800",
]


@pytest.mark.parametrize("name", [*FORMATS, "harmony"])
@settings(deadline=None, max_examples=100)
@given(text=st.lists(st.sampled_from(PIECES), max_size=25).map("".join) | st.text())
def test_nothing_that_the_policy_writes_raises(name, text):
    """Two parses of one text give the same calls with the same ids."""
    assert actions(name, text) == actions(name, text)
    for action in actions(name, text):
        json.dumps(action.result())


def test_deep_lists_and_long_numbers_are_invalid():
    for value in ("[" * 100_000, "1" * 10_000, '{"a": ' + "[" * 300 + "]" * 300 + "}}"):
        (call,) = actions("hermes", f'<tool_call>{{"name": "add", "arguments": {value}</tool_call>')
        assert isinstance(call, InvalidCall)
        (call,) = actions("plain", f"<add({value})>")
        assert isinstance(call, InvalidCall)


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("<think>\na\n</think>\n\nb", False, ("a", "\n\nb")),
        ("a\n</think>\n\nb", True, ("a", "\n\nb")),
        ("<think>\na", False, ("a", "")),
        ("a", True, ("a", "")),
        ("b", False, ("", "b")),
    ],
)
def test_thoughts(text, opened, expected):
    assert split_thoughts(text, ("<think>", "</think>"), opened) == expected


def test_a_call_in_the_thoughts_is_no_call():
    thoughts, text = split_thoughts(f"<think>{XML}</think>no", ("<think>", "</think>"), False)
    assert FORMATS["hermes"].read(text, SCHEMAS) == ("no", [])
    assert thoughts == XML


def test_ids_are_mistrals_or_differ_within_a_turn():
    assert actions(*VALID["mistral's list"])[0].id == actions(*VALID["mistral's id"])[0].id == "a1b2c3d4e"
    first, second = actions("plain", "<look()><look()>")
    assert first.id != second.id
    assert first.id.isalnum()
    assert len(first.id) == 9


def test_schemas_with_several_types():
    schemas = ToolSchemas([tool("go", far="string")])
    properties = schemas.functions["go"]["parameters"]["properties"]
    for schema, good, bad in (
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, None, "x"),
        ({"type": ["number", "array"]}, 1, {}),
        ({"type": "string", "enum": ["n", "s"]}, "n", "w"),
        ({}, {"any": 1}, None),
    ):
        properties["far"] = schema
        for value in (good, bad):
            text = f"<tool_call>{json.dumps({'name': 'go', 'arguments': {'far': value}})}</tool_call>"
            action = schemas.action(FORMATS["hermes"].read(text, schemas)[1][0], 0)
            assert isinstance(action, ToolCall) == (value == good or schema == {})


LONG = {
    "text without a message": ("harmony", "a" * 20_000),
    "channels without a message": ("harmony", "<|channel|>" * 4_000),
    "parameters without an end": (
        "hermes",
        f"<tool_call><function=add>{'<parameter=a>' * 8_000}</function></tool_call>",
    ),
    "parameters without a name": ("hermes", f"<tool_call><function=add>{'<parameter=' * 8_000}</function></tool_call>"),
    "blanks in an id": ("mistral", f"[TOOL_CALLS]add[CALL_ID]{' ' * 20_000}x"),
}


@pytest.mark.parametrize("case", LONG)
def test_a_long_turn_is_read_in_linear_time(case):
    """A turn is read in the rank without a deadline. In quadratic time, each of these turns took 2 to 15 s."""
    began = time.process_time()
    assert calls_of(*LONG[case]) == []
    assert time.process_time() - began < 1
