"""Checks whether a chat template prints earlier turns as the policy wrote them, when new messages follow."""

from collections.abc import Iterator, Mapping
from typing import Any

from rlhf.data.turns.rendering import ASKED, Messages, TemplateRenderer, answer, raised_by_templates

_THOUGHT = "A thought."
_SAID = "An answer."


def rewriting(template: TemplateRenderer, tools: Messages) -> str | None:
    """Return how the template rewrites earlier turns, such as "leaves out a part of a turn", or None if it does not.

    Args:
        tools: schemas of tools, if the template prints calls and results.
    """
    for what, conversation in _conversations(template, tools):
        try:
            problem = _rewriting(template, conversation, tools)
        except raised_by_templates() as error:
            return f"rejects a conversation {what}: {error}"  # the text may have braces
        if problem:
            return problem.format(what)
    return None


def _conversations(template: TemplateRenderer, tools: Messages) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    yield "with user messages between answers", [ASKED, answer(_SAID), ASKED, answer(_SAID), ASKED]
    system = {"role": "system", "content": "A system message."}
    if template.prints(system["content"], [system, ASKED]):
        yield "with a system message", [system, ASKED, answer(_SAID), ASKED]
    thoughtful = answer(_SAID, _THOUGHT)
    yield "with thoughts and user messages between answers", [ASKED, thoughtful, ASKED, thoughtful, ASKED]
    if not tools:
        return
    name = tools[0]["function"]["name"]
    first, second = (
        {"role": "tool", "name": name, "tool_call_id": number, "content": "A result."}
        for number in ("call00001", "call00002")
    )
    calling, thinking = answer(_SAID, results=[first]), answer(_SAID, _THOUGHT, [first])
    yield "with calls", [ASKED, calling, first, answer(_SAID), ASKED, calling, first]
    yield "with thoughts, calls and a user message", [ASKED, thinking, first, thoughtful, ASKED, thinking, first]
    both = answer(_SAID, results=[first, second])
    yield "with two calls in a turn", [ASKED, both, first, second, answer(_SAID), ASKED]


def _rewriting(template: TemplateRenderer, conversation: Messages, tools: Messages) -> str | None:
    """Return how the template rewrites a turn, with {} in place of the conversation, or None."""
    whole = template.text(conversation, tools)
    for i, message in enumerate(conversation):
        if message["role"] != "assistant":
            continue
        before = template.text(conversation[:i], tools)
        after = template.text(conversation[: i + 1], tools, generation_prompt=False)
        if not after.startswith(before):
            return "prints the text before an answer differently once the answer follows, in a conversation {}"
        for lost in (_SAID, message.get("reasoning_content", "")):
            if lost not in after.removeprefix(before):
                return "leaves out a part of a turn, in a conversation {}"
        if not whole.startswith(before) or not whole.startswith(after.rstrip()):
            return "changes earlier turns when new messages follow, in a conversation {}"
    return None
