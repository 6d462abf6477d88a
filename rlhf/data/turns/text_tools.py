"""Puts tools, calls and results into the texts of messages, for chat templates without tools."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.data.turns.plain_calls import announcement, plain_call, plain_results
from rlhf.data.turns.tool_calls import ToolSchemas

Message = dict[str, Any]


class TextTools:
    """Rewrites messages for a template that prints neither tools nor results.

    Args:
        fenced: whether to write Gemma's fenced blocks instead of `<name(arguments)>`.
        announced: whether to describe the tools in the prompt.
        system: whether the template prints system messages.
    """

    def __init__(self, tools: ToolSchemas, fenced: bool, announced: bool, system: bool):
        self._tools, self._fenced, self._system = tools, fenced, system
        self._announcement = None
        if announced and tools.functions:
            self._announcement = _fenced_announcement(tools) if fenced else announcement(tools)

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        """Return the messages of a prompt, with the description of the tools if `announced`."""
        fitted = self.fitted(messages)
        if self._announcement is None:
            return fitted
        if not self._system or fitted[0]["role"] == "system":
            first = fitted[0] | {"content": self._announcement + "\n\n" + fitted[0]["content"]}
            if fitted[0]["role"] == "system":
                first["content"] = fitted[0]["content"] + "\n\n" + self._announcement
            return [first, *fitted[1:]]
        return [{"role": "system", "content": self._announcement}, *fitted]

    def fitted(self, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        """Return the messages with results as user messages and calls as text; user messages in a row are joined."""
        fitted = list[Message]()
        for group in _groups(messages):
            if group[0]["role"] == "tool":
                texts = [str(message["content"]) for message in group]
                text = "\n".join(map(_fenced_result, texts)) if self._fenced else plain_results(texts)
                fitted.append({"role": "user", "content": text})
            elif fitted and group[0]["role"] == "user" == fitted[-1]["role"]:
                fitted[-1] = fitted[-1] | {"content": fitted[-1]["content"] + "\n" + group[0]["content"]}
            else:
                fitted.append(self._with_calls(group[0]))
        return fitted

    def _with_calls(self, message: Mapping[str, Any]) -> Message:
        calls = [call["function"] for call in message.get("tool_calls") or []]
        write = _fenced_call if self._fenced else plain_call
        texts = [message.get("content") or "", *(write(each["name"], each["arguments"], self._tools) for each in calls)]
        kept = {key: value for key, value in message.items() if key != "tool_calls"}
        return kept | {"content": "\n".join(text for text in texts if text)}


def _groups(messages: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Return consecutive results as one group, and each other message as a group of its own."""
    groups = list[list[Mapping[str, Any]]]()
    for message in messages:
        if groups and message["role"] == "tool" == groups[-1][0]["role"]:
            groups[-1].append(message)
        else:
            groups.append([message])
    return groups


def _fenced_announcement(tools: ToolSchemas) -> str:
    schemas = "\n".join(json.dumps(dict(function), ensure_ascii=False) for function in tools.functions.values())
    return (
        "You have access to these functions:\n"
        f"{schemas}\n"
        "To call functions, answer with one fenced block per call and nothing else:\n"
        '```tool_code\n{"name": function name, "parameters": {argument name: value}}\n```'
    )


def _fenced_call(name: str, arguments: Mapping[str, Any], tools: ToolSchemas) -> str:
    return f"```tool_code\n{json.dumps({'name': name, 'parameters': dict(arguments)}, ensure_ascii=False)}\n```"


def _fenced_result(content: str) -> str:
    return f"```tool_output\n{content}\n```"
