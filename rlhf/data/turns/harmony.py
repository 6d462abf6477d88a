"""Reads GPT-OSS's turns: thoughts, answers and calls in channels (OpenAI's harmony format)."""

import re
from collections.abc import Sequence

from rlhf.data.turns.tool_calls import BROKEN_JSON, Written, parsed_json

_BLOCK = re.compile(
    r"(?P<header>[^<]*(?:<\|(?:channel|constrain)\|>[^<]*)*)<\|message\|>(?P<body>.*?)"
    r"(?P<end><\|(?:end|call|return)\|>|(?=<\|start\|>)|\Z)",
    re.DOTALL,
)
_RECIPIENT = re.compile(r"\bto=(\S+?)(?=[\s<]|\Z)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_NAMESPACE = "functions."


def harmony(text: str) -> tuple[str, str, list[Written]]:
    """Return answer, thoughts and calls of a turn that continues `<|start|>assistant`."""
    answers, thoughts, calls = list[str](), list[str](), list[Written]()
    for block in _BLOCK.finditer(text.removeprefix("<|start|>")):
        header, body = block["header"], block["body"]
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        if recipient:
            calls.append(_call(recipient[1], body, closed=block["end"] == "<|call|>"))
        elif channel and channel[1] == "analysis":
            thoughts.append(body)
        else:
            answers.append(body)
    return _joined(answers), _joined(thoughts), calls


def _call(recipient: str, body: str, closed: bool) -> Written:
    if not recipient.startswith(_NAMESPACE):
        return Written(body, recipient, problem=f"there is no recipient {recipient!r}: tools are in {_NAMESPACE[:-1]}")
    name = recipient.removeprefix(_NAMESPACE)
    try:
        return Written(body, name, parsed_json(body))
    except BROKEN_JSON as error:
        cut = "" if closed else ", and the call does not end with <|call|>"
        return Written(body, name, problem=f"the arguments of {name} are not JSON: {error}{cut}")


def _joined(texts: Sequence[str]) -> str:
    return "\n".join(text.strip() for text in texts if text.strip())
