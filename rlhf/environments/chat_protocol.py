"""Reads requests of OpenAI's chat protocol, checks that they continue the conversation, and writes answers.

The process of an environment imports this module, so it has no dependency.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
Fork = dict[str, Any]
"""A rewritten history: its `messages` and `tools`, or its `token_ids`, and in `kept` how many of the earlier messages
(tokens) it begins with."""
Start = dict[str, Any]
"""The first history: `messages` and `tools`, or `token_ids`."""
_TEXTS = ("name", "tool_call_id", "reasoning_content")
"""Text fields of a message that the trainer reads, besides role and content."""
ROLES = ("system", "developer", "user", "assistant", "tool")
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "auto"),
    "stop": (None, [], ""),
    "logprobs": (None, False),
    "functions": (None,),
    "function_call": (None,),
}
"""Parameters that would change the answer, each with the values that the trainer supports."""


class RejectedRequest(Exception):
    """A request that the trainer cannot answer. The text is for the author of the program."""


@dataclass
class Conversation:
    """The messages of one episode's newest row, as the program sends them."""

    messages: list[Message] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)

    def take(self, request: Any) -> list[Message] | Start | Fork:
        """Add the new messages of a request and return them, or the whole history if the request begins or rewrites it.

        A request rewrites the history if it does not repeat all earlier messages and answers, or if it has other tools.

        Raises:
            RejectedRequest: the request cannot be answered, or needs an unsupported feature.
        """
        messages, tools = _checked(request)
        kept = _repeated(self.messages, messages)
        if not self.messages:
            _check_start(messages)
            self.messages, self.tools = messages, tools
            return {"messages": messages[:], "tools": tools}
        if kept < len(self.messages) or tools != self.tools:
            _check_start(messages)
            self.messages, self.tools = _named(messages), tools
            return {"messages": self.messages[:], "tools": tools, "kept": kept}
        new = messages[kept:]
        if not new:
            raise RejectedRequest("the request adds no message after the last answer. Add one, or leave the answer out")
        _check_reply(new, self.messages[-1])
        self.messages += new
        return new

    def answered(self, message: Message) -> None:
        """Add the policy's answer."""
        self.messages.append(message)

    def answer(self, number: int, request: dict[str, Any], call: Mapping[str, Any]) -> dict[str, Any]:
        """Add the policy's answer, which is in the trainer's `call`, and return the answer number `number`."""
        self.answered(call["message"])
        return completion(number, str(request.get("model", "rlhf")), call["message"], call["usage"])


def completion(number: int, model: str, message: Message, usage: dict[str, int]) -> dict[str, Any]:
    """Return the answer to a request.

    All its values are functions of the episode, so that a replay returns the same bytes.
    """
    reason = "tool_calls" if message.get("tool_calls") else "stop"
    choice = {"index": 0, "message": _on_the_wire(message), "finish_reason": reason, "logprobs": None}
    total = usage["prompt_tokens"] + usage["completion_tokens"]
    return {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": 0,
        "model": model,
        "choices": [choice],
        "usage": usage | {"total_tokens": total},
    }


def chunks(whole: dict[str, Any], with_usage: bool) -> list[str]:
    """Return the events of a streamed answer."""
    head = {key: whole[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    choice = whole["choices"][0]
    delta = dict(choice["message"])
    if calls := delta.get("tool_calls"):
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
    parts: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]},
    ]
    if with_usage:
        parts.append({"choices": [], "usage": whole["usage"]})
    return events(head, parts)


def events(head: dict[str, Any], parts: Sequence[dict[str, Any]]) -> list[str]:
    """Return the server-sent events of a stream. Each has the fields `head`."""
    return [*(f"data: {json.dumps(head | part)}\n\n" for part in parts), "data: [DONE]\n\n"]


def is_start(value: Any) -> bool:
    """Return whether the reply to `start`, from a process that runs users' code, is a `Start`."""
    if isinstance(value, dict) and value.keys() == {"token_ids"}:
        return _are_tokens(value["token_ids"])
    return (
        isinstance(value, dict)
        and value.keys() == {"messages", "tools"}
        and _are_messages(value["messages"])
        and isinstance(value["tools"], list)
        and all(_is_tool(tool) for tool in value["tools"])
    )


def is_reply(value: Any) -> bool:
    """Return whether the reply to `answer` has new messages or tokens, or a `Fork`, or None at the program's end."""
    if isinstance(value, dict):
        rest = {name: each for name, each in value.items() if name != "kept"}
        if not is_start(rest) or type(value.get("kept")) is not int:
            return False
        return 0 <= value["kept"] <= len(rest["token_ids" if "token_ids" in rest else "messages"])
    if value is None or _are_tokens(value):
        return True
    return _are_messages(value) and all(each["role"] in ("tool", "user") for each in value)


def _are_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int and 0 <= each < 1 << 31 for each in value)


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(_is_message(each) for each in value)


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict) or value.get("role") not in ROLES:
        return False
    texts = [value.get("content"), *(value[name] for name in _TEXTS if name in value)]
    calls = value.get("tool_calls", [])
    return all(isinstance(text, str) for text in texts) and isinstance(calls, list) and all(map(_is_call, calls))


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return (
        isinstance(function, dict)
        and isinstance(call.get("id"), str)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("arguments"), dict)
    )


def _is_tool(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return False
    schema = function.get("parameters", {})
    if not isinstance(schema, dict) or not _are_texts(schema.get("required", [])):
        return False
    properties = schema.get("properties", {})
    return isinstance(properties, dict) and all(_is_schema(each) for each in properties.values())


def _is_schema(schema: Any) -> bool:
    """Return whether `ToolSchemas` can check an argument: type, enum and anyOf have the forms of JSON schema."""
    if not isinstance(schema, dict) or not isinstance(schema.get("enum", []), list):
        return False
    options, kinds = schema.get("anyOf", []), schema.get("type", [])
    return (
        isinstance(options, list)
        and all(_is_schema(option) for option in options)
        and (isinstance(kinds, str) or _are_texts(kinds))
    )


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _checked(request: Any) -> tuple[list[Message], list[dict[str, Any]]]:
    if not isinstance(request, dict) or not isinstance(request.get("messages"), list) or not request["messages"]:
        raise RejectedRequest("the body is not a JSON object with a list `messages`")
    check_supported(request, UNSUPPORTED)
    tools = request.get("tools") or []
    if not isinstance(tools, list) or not all(_is_tool(tool) for tool in tools):
        raise RejectedRequest(
            'each of `tools` must be {"type": "function", "function": {"name", "parameters": schema}}'
        )
    return [_read(message) for message in request["messages"]], tools


def check_supported(given: Mapping[str, Any], unsupported: Mapping[str, Sequence[Any]], where: str = "") -> None:
    """Raise RejectedRequest if a parameter of `unsupported` has a value that is not listed there."""
    for name, supported in unsupported.items():
        if given.get(name) not in supported:
            raise RejectedRequest(f"{where}{name}={json.dumps(given[name])[:80]} is not supported. Remove it")
    if not isinstance(given.get("stream_options") or {}, dict):
        raise RejectedRequest("stream_options is not a JSON object")


def _read(message: Any) -> Message:
    """Return a message with text content and parsed arguments. Drop all fields that the trainer does not use."""
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise RejectedRequest(f"each message needs a role of {', '.join(ROLES)}")
    role = "system" if message["role"] == "developer" else message["role"]
    found: Message = {"role": role, "content": _text(message.get("content"))}
    for name in _TEXTS:
        if isinstance(message.get(name), str):
            found[name] = message[name]
    if calls := message.get("tool_calls"):
        found["tool_calls"] = [_call(call) for call in calls]
    return found


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        return "".join(part["text"] for part in content)
    raise RejectedRequest("the content of a message is not text. Send a string, or parts of type text")


def _call(call: Any) -> dict[str, Any]:
    """Return a call with parsed arguments."""
    read = None
    try:
        arguments = call["function"]["arguments"]
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
        read = {
            "type": "function",
            "id": call["id"],
            "function": {"name": call["function"]["name"], "arguments": parsed},
        }
    except (KeyError, TypeError, ValueError, RecursionError):
        pass
    if not _is_call(read):
        raise RejectedRequest("each of `tool_calls` needs an id, and a function with name and arguments, a JSON object")
    assert read is not None
    return read


def _same(before: Message, now: Message) -> bool:
    """Return whether a program repeats a message.

    The program may leave out reasoning, and white space around the policy's text.
    """
    if before["role"] != "assistant":
        return {**before, "name": None} == {**now, "name": None}
    return (
        now["role"] == "assistant"
        and before["content"].strip() == now["content"].strip()
        and before.get("tool_calls", []) == now.get("tool_calls", [])
    )


def _repeated(before: Sequence[Message], now: Sequence[Message]) -> int:
    """Return the number of messages that `before` and `now` have in common at their start."""
    same = [_same(*pair) for pair in zip(before, now, strict=False)]
    return same.index(False) if False in same else len(same)


def _check_start(messages: Sequence[Message]) -> None:
    if messages[-1]["role"] == "assistant":
        raise RejectedRequest("the request ends with an assistant message, which the policy cannot continue")
    if not any(message["content"].strip() for message in messages):
        raise RejectedRequest("the messages of the request are empty")


def _named(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with the tool's name in each result, because chat templates print it."""
    called: dict[str, str] = {}
    named = []
    for message in messages:
        called |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", [])}
        name = called.get(message.get("tool_call_id", "")) if message["role"] == "tool" else None
        named.append(message if name is None else message | {"name": name})
    return named


def _check_reply(new: Sequence[Message], answer: Message) -> None:
    """Check the messages after an answer. Store the tool's name in each result, because chat templates print it."""
    called = {call["id"]: call["function"]["name"] for call in answer.get("tool_calls", [])}
    roles = [message["role"] for message in new]
    if sorted(roles, key=lambda role: role != "tool") != roles:
        raise RejectedRequest("the tool messages must come first after an answer")
    for message in new:
        if message["role"] == "tool":
            number = message.get("tool_call_id")
            if number not in called:
                raise RejectedRequest(f"a tool message has tool_call_id={number!r}, which the last answer did not call")
            message["name"] = called.pop(number)
        elif message["role"] != "user":
            raise RejectedRequest(f"only tool and user messages can follow an answer, not {message['role']}")
    if called:
        raise RejectedRequest(f"the calls {', '.join(called)} have no tool message with their result")


def _on_the_wire(message: Message) -> Message:
    sent = dict(message)
    if calls := message.get("tool_calls"):
        sent["content"] = message["content"] or None
        sent["tool_calls"] = [
            call | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}}
            for call in calls
        ]
    return sent
